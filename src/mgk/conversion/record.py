"""What was converted, as the configuration of a model has it under ``mgk``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

FIELD = "mgk"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The arguments of :func:`mgk.convert` on which the shapes and the meaning of the weights depend."""

    attention: str
    """The preset."""
    components: int
    """Keys per position."""
    num_heads: int | None
    """Query heads; ``None``: as before."""
    num_kv_heads: int | None
    """Key/value heads; ``None``: as before."""
    fade_steps: int
    """Steps of the start ``"near"``; 0: there is none."""
    learn_variance: bool
    """Whether variances are parameters."""
    variance_scale: float | list[float]
    """Variance over ``1 / scaling``."""
    shift_init_std: float
    """Standard deviation of the initial shifts."""
    backend: str
    """Which backend computes the attention."""

    def write(self, config: Any) -> None:
        """Put it into a configuration."""
        setattr(config, FIELD, asdict(self))

    @classmethod
    def read(cls, config: Any) -> Record:
        """Take it out of a configuration."""
        found = getattr(config, FIELD, None)
        expected = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or set(found) != expected:
            raise ValueError(f"config.{FIELD} must be what mgk.convert wrote, got {found!r}")
        return cls(**found)
