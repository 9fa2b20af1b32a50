"""What the library knows about a corpus before it is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from mgk.data.store import Corpus

T = TypeVar("T")


class Progress(Protocol):
    """Wraps an iterable to show how far it is, as ``rich.progress.track`` does."""

    def __call__(self, steps: Iterable[T], description: str, total: int | None = None) -> Iterable[T]: ...


def no_progress(steps: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """The progress bar of a library call: none."""
    return steps


@dataclass(frozen=True, kw_only=True)
class CorpusKind:
    """A corpus that can be prepared."""

    name: str
    """What the command line calls it."""
    title: str
    """One line for people."""
    task: str
    """``classification``, ``pairs``, ``language``, ``translation`` or ``uptraining``."""
    prepare: Callable[..., None]
    """``prepare(source, folder, progress=no_progress, **options)`` reads the raw files in the folder ``source``
    (``None`` for a corpus that is generated) and writes the corpus to ``folder``."""
    decode: Callable[[Corpus, str, NDArray[Any]], str]
    """``decode(corpus, field, tokens)``: back to text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``prepare`` takes besides, with its defaults."""
    is_generated: bool = False
    """Whether it needs no raw files."""
    origin: str = ""
    """Where the raw files come from, and how they are called."""


def check_options(kind: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their defaults; an unknown one is refused."""
    for name in given:
        if name not in known:
            raise ValueError(f"{kind} has the options {', '.join(known) or 'none'}, got {name!r}")
    return {**known, **given}
