"""The division of the pairs of a call into blocks and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Largest number of pairs, rows and keys in a tile. Smaller tiles fit the cache better, larger ones spend less time in
# Python.
TILE_PAIRS = 2**20
TILE_ROWS = 512
TILE_KEYS = 512

# Number of elements in the keys of a block, whose operands are prepared together.
BLOCK_NUMBERS = 2**20


def spans(start: int, stop: int, length: int) -> Iterator[slice]:
    """Yield slices of ``length`` that cover ``start`` to ``stop``; the last one may be shorter."""
    for at in range(start, stop, length):
        yield slice(at, min(at + length, stop))


class Grid(NamedTuple):
    """The cut of a call into blocks of heads, and of each block into tiles of heads, rows and keys."""

    batch: int
    heads: int
    """Key/value heads"""
    group: int
    """Query heads per key/value head; their queries are concatenated into its rows"""
    queries: int
    keys: int
    dim: int
    is_causal: bool

    @property
    def rows(self) -> int:
        return self.group * self.queries

    @property
    def tile_keys(self) -> int:
        # A tile on the diagonal is computed as a whole, so smaller tiles waste less.
        return min(self.keys, TILE_KEYS // 2 if self.is_causal else TILE_KEYS)

    @property
    def tile_heads(self) -> int:
        return max(1, TILE_PAIRS // (min(self.rows, TILE_ROWS) * self.tile_keys))

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield the samples and heads of each block: all heads of some samples, or some heads of one sample."""
        yield from self._some_heads(max(self.tile_heads, BLOCK_NUMBERS // (max(self.rows, self.keys) * self.dim)))

    def tiles_of_heads(self) -> Iterator[tuple[slice, slice]]:
        """Yield the samples and heads whose pairs make one tile."""
        yield from self._some_heads(self.tile_heads)

    def _some_heads(self, count: int) -> Iterator[tuple[slice, slice]]:
        for samples in spans(0, self.batch, max(1, count // self.heads)):
            for heads in spans(0, self.heads, min(count, self.heads)):
                yield samples, heads

    def blocks_of_rows(self) -> Iterator[slice]:
        if not self.is_causal:
            yield from spans(0, self.rows, TILE_ROWS)
            return
        # A causal block holds queries of a single head and leaves out those that see no key.
        blind = max(0, self.queries - self.keys)
        for head in range(0, self.rows, self.queries):
            yield from spans(head + blind, head + self.queries, TILE_ROWS)

    def blocks_of_keys(self) -> Iterator[slice]:
        return spans(0, self.keys, self.tile_keys)

    def last_visible(self, rows: slice, keys: slice) -> tuple[int, int]:
        """Return the last key that the first row sees and that the last row sees, as offsets into ``keys``."""
        if not self.is_causal:
            return self.keys, self.keys
        first = rows.start % self.queries + self.keys - self.queries - keys.start
        return first, first + rows.stop - rows.start - 1
