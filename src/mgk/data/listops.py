"""ListOps of the Long Range Arena, generated from its published grammar: nested operators on lists of digits.

::

    [MAX 2 9 [MIN 4 7 ] 0 ]  =  9

A node at depth less than 10 (the root has depth 1) is an operator with probability 1/4 and a digit otherwise; an
operator is one of four and has 2 to 10 arguments, all equally likely. Trees are drawn until enough distinct ones have
a length inside the window. The official files are one such draw; ours depends on nothing but the options.

Tokens are numbered in the order of :data:`TOKENS`; 0 is padding.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, no_progress
from mgk.data.store import Corpus, Sequences, Writer, flatten

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
TOKENS = (*OPERATORS, CLOSE, *"0123456789")
"""Token ``TOKENS[i]`` has the id ``i + 1``: operators 1 to 4, the closing bracket 5, digit d is ``6 + d``."""

IDS = {token: number for number, token in enumerate(TOKENS, start=1)}
CLASSES = 10

MAX_DEPTH = 10
MIN_ARGUMENTS, MAX_ARGUMENTS = 2, 10

CHUNK = 16_384
"""Trees drawn under one seed, before the window of lengths rejects most of them. Changing it changes the data."""

PATIENCE = 64
"""Chunks in a row without one new tree after which the window counts as exhausted."""

Drawn = tuple[bytes, NDArray[np.int64], NDArray[np.int64]]
"""Trees in a row: tokens ``[total]``, one byte each, lengths ``[count]`` and labels ``[count]``."""

OPTIONS: dict[str, Any] = {
    "seed": 0, "train": 96_000, "valid": 2_000, "test": 2_000, "minimum": 500, "maximum": 2_000, "processes": None,
}  # fmt: skip


def prepare(
    source: Path | None,
    folder: Path,
    progress: Progress = no_progress,
    *,
    seed: int = 0,
    train: int = 96_000,
    valid: int = 2_000,
    test: int = 2_000,
    minimum: int = 500,
    maximum: int = 2_000,
    processes: int | None = None,
) -> None:
    """Generate the corpus: splits ``train``, ``valid`` and ``test`` with the sequences ``text`` and numbers ``labels``.

    No tree occurs twice, neither within a split nor across them. The test and validation trees are drawn first, so they
    stay the same whatever the size of the training split, and a smaller training split is the start of a larger one.

    Args:
        source: not read, there are no raw files.
        folder: where the corpus goes.
        progress: shows how far it is.
        seed: of the random numbers.
        train: number of training trees.
        valid: number of validation trees.
        test: number of test trees.
        minimum: a tree has more tokens than this.
        maximum: a tree has fewer tokens than this.
        processes: how many draw trees, by default this one alone; the result is the same with any number. They are
            spawned, so a script that asks for several needs the usual ``if __name__ == "__main__"``.
    """
    options = {"seed": seed, "train": train, "valid": valid, "test": test, "minimum": minimum, "maximum": maximum}
    _check(options, processes)
    count = train + valid + test
    with contextlib.closing(_distinct_trees(seed, minimum, maximum, processes or 1)) as drawn:
        trees = list(progress(itertools.islice(drawn, count), "drawing trees", total=count))
    if len(trees) < count:
        raise ValueError(
            f"trees with more than {minimum} and fewer than {maximum} tokens must be common enough for {count:,} "
            f"distinct ones, got {len(trees):,} and then none in {PATIENCE * CHUNK:,} draws"
        )
    parts = {"test": trees[:test], "valid": trees[test : test + valid], "train": trees[test + valid :]}
    with Writer(folder, CORPUS.name, source={}, options=options) as writer:
        for split in ("train", "valid", "test"):
            writer.sequences(split, "text", *flatten([tokens for tokens, _ in parts[split]]))
            writer.numbers(split, "labels", np.array([label for _, label in parts[split]], dtype=np.int64))
        writer.fact("vocabulary", list(TOKENS))
        writer.fact("classes", CLASSES)


def evaluate(tokens: Sequence[int] | NDArray[Any]) -> int:
    """The value of one tree, given as token ids without padding."""
    # One list for each operator that is still open, below them the list that receives the root.
    pending: list[list[int]] = [[]]
    operators: list[int] = []
    position = -1
    for position, token in enumerate(map(int, tokens)):
        if pending[0]:
            raise DataError(f"a tree must end with its root, got another token at position {position}")
        if not 1 <= token <= len(TOKENS):
            raise DataError(f"a token must lie in [1, {len(TOKENS)}], got {token} at position {position}")
        if token <= len(OPERATORS):
            operators.append(token)
            pending.append([])
        elif token > IDS[CLOSE]:
            pending[-1].append(token - IDS["0"])
        else:
            if not operators:
                raise DataError(f"a closing bracket must have an operator, got none at position {position}")
            arguments = pending.pop()
            if not arguments:
                raise DataError(f"an operator must have arguments, got its closing bracket at position {position}")
            pending[-1].append(_apply(operators.pop(), arguments))
    if operators or not pending[0]:
        raise DataError(
            f"a tree must be whole, got its end at position {position + 1} with {len(operators)} open brackets"
        )
    return pending[0][0]


def encode(text: str) -> NDArray[np.uint8]:
    """Token ids ``[length]`` of a tree such as ``[MAX 2 9 [MIN 4 7 ] 0 ]``."""
    tokens = text.split()
    for position, token in enumerate(tokens):
        if token not in IDS:
            raise DataError(f"a token must be one of {' '.join(TOKENS)}, got {token!r} at position {position}")
    return np.array([IDS[token] for token in tokens], dtype=np.uint8)


def decode(corpus: Corpus | None, field: str, tokens: NDArray[Any]) -> str:
    """The text of token ids ``[length]``, padding left out."""
    for position, token in enumerate(tokens):
        if not 0 <= token <= len(TOKENS):
            raise DataError(f"a token must lie in [0, {len(TOKENS)}], got {token} at position {position}")
    return " ".join(TOKENS[token - 1] for token in map(int, tokens) if token)


def root_operator_rule(
    train_tokens: Sequences, train_labels: NDArray[Any], tokens: Sequences, labels: NDArray[Any]
) -> float:
    """Accuracy of a rule that reads the first token only and answers with its most frequent label in training.

    A model has to beat this before it can be said to read the lists.
    """
    counts = np.zeros((len(TOKENS) + 1, CLASSES), dtype=np.int64)
    np.add.at(counts, (_roots(train_tokens), np.asarray(train_labels)), 1)
    return float(np.mean(counts.argmax(axis=1)[_roots(tokens)] == labels))


def draw(seed: int, chunk: int, minimum: int, maximum: int) -> Drawn:
    """Draw :data:`CHUNK` trees and return those in the window.

    All trees grow together, one depth after the other. Their shapes come first, and a tree is dropped as soon as it is
    too long; symbols are drawn only for the shapes that are kept. Symbols do not bear on the length, so what remains
    has exactly the distribution of the grammar given the window.
    """
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(chunk,))))
    is_operator, arguments = _draw_shapes(random, minimum, maximum)
    depths = len(is_operator)
    values: list[NDArray[Any]] = []
    operators: list[NDArray[Any]] = []
    for depth in range(depths):
        values.append(random.integers(0, 10, size=len(is_operator[depth]), dtype=np.uint8))
        operators.append(random.integers(0, len(OPERATORS), size=len(arguments[depth]), dtype=np.uint8))
    symbols = [IDS["0"] + digits for digits in values]
    sizes = [np.ones(len(nodes), dtype=np.int64) for nodes in is_operator]
    for depth in reversed(range(depths)):
        where = is_operator[depth]
        symbols[depth][where] = operators[depth] + 1
        if len(arguments[depth]):
            starts = _starts(arguments[depth])
            sizes[depth][where] = 2 + np.add.reduceat(sizes[depth + 1], starts)
            values[depth][where] = _apply_all(operators[depth], values[depth + 1], starts, arguments[depth])

    tokens = np.empty(int(sizes[0].sum()), dtype=np.uint8)
    positions = _starts(sizes[0])
    for depth in range(depths):
        where = is_operator[depth]
        opening = positions[where]
        tokens[positions] = symbols[depth]
        tokens[opening + sizes[depth][where] - 1] = IDS[CLOSE]
        if not len(opening):
            break
        # Children follow the operator one after the other: a running sum that starts anew at each operator.
        running = _starts(sizes[depth + 1])
        first = running[_starts(arguments[depth])]
        positions = running + np.repeat(opening + 1 - first, arguments[depth])
    return tokens.tobytes(), sizes[0], values[0].astype(np.int64)


def _draw_shapes(
    random: np.random.Generator, minimum: int, maximum: int
) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.int64]]]:
    """The kept shapes, by depth: which nodes are operators ``[nodes]``, and the arguments of each ``[operators]``.

    Nodes of a depth stand in the order of their parents, so the arguments say which nodes belong together.
    """
    lengths = np.ones(CHUNK, dtype=np.int64)
    tree = np.arange(CHUNK)
    levels = []
    for depth in range(1, MAX_DEPTH + 1):
        if depth < MAX_DEPTH:
            is_operator = random.integers(0, 4, size=len(tree), dtype=np.uint8) == 0
        else:
            is_operator = np.zeros(len(tree), dtype=np.bool_)
        owner = tree[is_operator]
        arguments = random.integers(MIN_ARGUMENTS, MAX_ARGUMENTS, size=len(owner), dtype=np.uint8, endpoint=True)
        arguments = arguments.astype(np.int64)
        levels.append((tree, is_operator, owner, arguments))
        # The operator itself is counted already; its bracket and its arguments are new.
        lengths += np.bincount(owner, weights=1 + arguments, minlength=CHUNK).astype(np.int64)
        fits = lengths[owner] < maximum
        tree = np.repeat(owner[fits], arguments[fits])
    kept = (minimum < lengths) & (lengths < maximum)
    return (
        [is_operator[kept[tree]] for tree, is_operator, _, _ in levels],
        [arguments[kept[owner]] for _, _, owner, arguments in levels],
    )


def _apply(operator: int, arguments: list[int]) -> int:
    """Value of one operator, by its token id."""
    name = TOKENS[operator - 1]
    if name == "[MIN":
        return min(arguments)
    if name == "[MAX":
        return max(arguments)
    if name == "[SM":
        return sum(arguments) % 10
    ranked = sorted(arguments)
    # Both middle ones; with an odd number they are the same.
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) // 2


def _apply_all(
    operators: NDArray[np.uint8], values: NDArray[np.uint8], starts: NDArray[np.int64], arguments: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Values of many operators ``[operators]`` on segments of ``values``; at most ten digits, so a sum fits a byte."""
    least, most, total = (function.reduceat(values, starts) for function in (np.minimum, np.maximum, np.add))
    segment = np.repeat(np.arange(len(operators), dtype=np.int32) * 10, arguments)
    # Sorted within each segment: the segment number leads the digit, and is taken off again.
    ranked = np.sort(segment + values) - segment
    median = (ranked[starts + (arguments - 1) // 2] + ranked[starts + arguments // 2]) // 2
    return np.choose(operators, (least, most, median, total % 10)).astype(np.uint8)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of several neighbouring segments starts."""
    return np.cumsum(lengths) - lengths


def _roots(sequences: Sequences) -> NDArray[Any]:
    return np.asarray(sequences.tokens)[np.asarray(sequences.offsets[:-1])]


def _distinct_trees(seed: int, minimum: int, maximum: int, processes: int) -> Generator[tuple[bytes, int], None, None]:
    """Distinct trees and their labels, without end unless the window has no more."""
    seen: set[bytes] = set()
    fruitless = 0
    with contextlib.closing(_chunks(seed, minimum, maximum, processes)) as chunks:
        for tokens, lengths, labels in chunks:
            before = len(seen)
            ends = np.cumsum(lengths)
            for start, end, label in zip((ends - lengths).tolist(), ends.tolist(), labels.tolist(), strict=True):
                tree = tokens[start:end]
                if tree not in seen:
                    seen.add(tree)
                    yield tree, label
            fruitless = fruitless + 1 if len(seen) == before else 0
            if fruitless == PATIENCE:
                return


def _chunks(seed: int, minimum: int, maximum: int, processes: int) -> Generator[Drawn, None, None]:
    """All chunks in order, drawn ahead by other processes if there are to be several."""
    if processes == 1:
        for chunk in itertools.count():
            yield draw(seed, chunk, minimum, maximum)
    # Spawned, for a fork would copy the locks of torch's threads in whatever state they are.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        ahead: deque[Future[Drawn]] = deque()
        for chunk in itertools.count():
            ahead.append(pool.submit(draw, seed, chunk, minimum, maximum))
            if len(ahead) > 2 * processes:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _check(options: dict[str, int], processes: int | None) -> None:
    given = options if processes is None else {**options, "processes": processes}
    for name, value in given.items():
        least = 0 if name in ("seed", "minimum") else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if options["maximum"] < options["minimum"] + 2:
        raise ValueError(f"maximum must be at least minimum + 2 = {options['minimum'] + 2}, got {options['maximum']}")


CORPUS = CorpusKind(
    name="listops",
    title="ListOps: the value of nested MIN, MAX, MED and SM over lists of digits, 500 to 2,000 tokens",
    task="classification",
    prepare=prepare,
    decode=decode,
    options=OPTIONS,
    is_generated=True,
    origin="generated from the grammar of the Long Range Arena (google-research/long-range-arena, data/listops.py)",
)
