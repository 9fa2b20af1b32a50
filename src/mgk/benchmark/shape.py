"""The shapes at which attention is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of softmax attention. A preset that replaces it gets half the heads with the same width."""

    batch: int
    heads: int
    """Number of heads of softmax attention."""
    tokens: int
    head_dim: int
    is_causal: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "tokens", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a shape must be at least 1, got {getattr(self, name)}")
        if self.heads % 2 != 0:
            raise ValueError(f"heads of a shape must be even, since the mixtures get half of them, got {self.heads}")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse ``B,H,N,D`` or ``B,H,N,D,causal``."""
        sizes, last = text.split(","), ""
        if sizes[-1] in ("causal", "full"):
            last = sizes.pop()
        if len(sizes) != 4 or not all(size.strip().isdecimal() for size in sizes):
            raise ValueError(f"--shape must look like 32,8,4096,64 or 32,8,4096,64,causal, got {text!r}")
        batch, heads, tokens, head_dim = map(int, sizes)
        return cls(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, is_causal=last == "causal")

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Shape:
        """Return the shape of a record of the JSON."""
        return cls(
            batch=record["batch"], heads=record.get("baseline_heads", record["heads"]), tokens=record["tokens"],
            head_dim=record["head_dim"], is_causal=record["causal"],
        )  # fmt: skip

    @property
    def option(self) -> str:
        """Format the shape for :meth:`parse`."""
        sizes = f"{self.batch},{self.heads},{self.tokens},{self.head_dim}"
        return f"{sizes},causal" if self.is_causal else sizes

    @property
    def mixture_heads(self) -> int:
        return self.heads // 2

    def __str__(self) -> str:
        kind = "causal" if self.is_causal else "full"
        return f"batch {self.batch}, {self.heads} heads, {self.tokens:,} tokens, head_dim {self.head_dim}, {kind}"

    def facts(self) -> dict[str, Any]:
        """Return the entries of a row of the JSON, except the heads."""
        return {
            "batch": self.batch,
            "tokens": self.tokens,
            "head_dim": self.head_dim,
            "causal": self.is_causal,
        }
