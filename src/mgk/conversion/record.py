"""The record of a conversion in the configuration of a model, under ``mgk``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

FIELD = "mgk"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The arguments of :func:`mgk.convert` on which the shapes and the meaning of the weights depend."""

    attention: str
    """Attention preset."""
    components: int
    """Keys per position."""
    num_heads: int | None
    """Number of query heads; ``None`` if unchanged."""
    num_kv_heads: int | None
    """Number of key/value heads; ``None`` if unchanged."""
    fade_steps: int
    """Steps of the start ``"near"``; 0 for other starts."""
    learn_variance: bool
    """Whether variances are parameters."""
    variance_scale: float | list[float]
    """Variance divided by ``1 / scaling``."""
    shift_init_std: float
    """Standard deviation of the initial shifts."""
    backend: str
    """Backend of the attention."""

    def write(self, config: Any) -> None:
        """Write the record into a configuration."""
        setattr(config, FIELD, asdict(self))

    @classmethod
    def read(cls, config: Any) -> Record:
        """Read the record of a configuration."""
        found = getattr(config, FIELD, None)
        expected = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or set(found) != expected:
            raise ValueError(f"config.{FIELD} must be what mgk.convert wrote, got {found!r}")
        return cls(**found)
