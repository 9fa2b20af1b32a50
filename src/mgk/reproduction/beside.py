"""Extra columns of a table: perplexities with the other kind of window, and the training throughput of a row."""

from __future__ import annotations

from collections.abc import Sequence

from mgk.reproduction import throughput
from mgk.reproduction.metrics import Metric, metric
from mgk.reproduction.results import Results
from mgk.reproduction.statistics import show

OTHER_WINDOWS = {
    "valid_perplexity": "valid_disjoint_perplexity", "test_perplexity": "test_disjoint_perplexity",
    "test_bits_per_token": "test_sliding_bits_per_token",
}  # fmt: skip
"""Of windows that slide and of those that do not, the one that a table is not about."""


def other_windows(shown: Sequence[Metric]) -> list[Metric]:
    """Return the metrics of the same numbers with the other kind of window."""
    return [metric(OTHER_WINDOWS[each.name]) for each in shown if each.name in OTHER_WINDOWS]


def columns(
    recipe: str, shown: Sequence[Metric], rows: Sequence[str], results: Results
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The heads of the columns, and what each row has there. A column that no row has anything for is left out.

    Args:
        recipe: whose rows they are.
        shown: what the table is about.
        rows: of the table.
        results: what we have.
    """
    found: list[tuple[str, list[str]]] = []
    for each in other_windows(shown):
        values = [list(results.values(recipe, row, each).values()) for row in rows]
        found.append((each.title, [show(own, each.decimals) for own in values]))
    speeds = [throughput.cells(recipe, row, results) for row in rows]
    found += [(head, [cells[place] for cells in speeds]) for place, head in enumerate(throughput.HEADER)]
    found = [(head, cells) for head, cells in found if any(cells)]
    lines = {row: tuple(cells[number] for _, cells in found) for number, row in enumerate(rows)}
    return tuple(head for head, _ in found), lines
