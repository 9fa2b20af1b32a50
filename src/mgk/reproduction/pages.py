"""All pages by name, and the index of pages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mgk.reproduction import cost_pages, equal_cache, fidelity, plateau, shift, trained_pages
from mgk.reproduction.page import Grid, Page, header, markdown, markdown_table
from mgk.reproduction.results import Results
from mgk.reproduction.tables import OURS, SEEDS, own_page, table_names, table_page

ALL = "all"
INDEX = "README.md"
QUESTIONS_OF_OURS: Mapping[str, Callable[[Results, Path, int], Page]] = {
    equal_cache.NAME: equal_cache.equal_cache_page, plateau.NAME: plateau.plateau_page, shift.NAME: shift.shift_page,
}  # fmt: skip
"""Pages about one question each, which the paper does not ask."""


def names() -> list[str]:
    """Return the names of all pages: tables, then figures, as in the paper, then our own experiments."""
    figures = sorted({**cost_pages.PAGES, **trained_pages.PAGES}, key=lambda name: int(name[1:]))
    return [*table_names(), *figures, *OURS, *QUESTIONS_OF_OURS, fidelity.NAME]


def parse_names(given: Sequence[str]) -> list[str]:
    """Parse the names of pages; ``all`` is every page."""
    known = {name.lower(): name for name in names()}
    wanted: list[str] = []
    for name in given:
        if name.lower() == ALL:
            wanted += known.values()
        elif name.lower() in known:
            wanted.append(known[name.lower()])
        else:
            close = difflib.get_close_matches(name.lower(), [*known, ALL], n=1)
            hint = f" (did you mean {known.get(close[0], ALL)!r}?)" if close else ""
            raise ValueError(f"a page must be one of {', '.join(known.values())} or {ALL}, got {name!r}{hint}")
    return list(dict.fromkeys(wanted))


def build(name: str, results: Results, folder: Path, seeds: int = SEEDS) -> Page:
    """Build one page, and draw its pictures into ``folder``.

    Args:
        name: one of :func:`names`.
        results: our results.
        folder: folder of the pages.
        seeds: number of seeds that each row should have.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if name == fidelity.NAME:
        return fidelity.fidelity_page(results, seeds)
    if name in QUESTIONS_OF_OURS:
        return QUESTIONS_OF_OURS[name](results, folder, seeds)
    if name in cost_pages.PAGES:
        return cost_pages.PAGES[name](name, folder)
    if name in trained_pages.PAGES:
        return trained_pages.PAGES[name](name, results, folder, seeds)
    return own_page(name, results, seeds) if name in OURS else table_page(name, results, seeds)


def write(page: Page, folder: Path) -> Path:
    """Write the Markdown of a page, and remove pictures that are out of date."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{page.name}[.-]*png"):
        if old not in page.pictures:
            old.unlink()
    path = folder / f"{page.name}.md"
    path.write_text(markdown(page), encoding="utf-8")
    return path


def write_index(pages: Sequence[Page], results: Results, folder: Path) -> Path:
    """Write the index of pages."""
    lines = tuple((f"[{page.name}]({page.name}.md)", page.title, page.state, page.tally) for page in pages)
    parts = [
        header(ALL),
        "# Results",
        "Every table and figure of the paper, made again from `results/`: the paper's number beside ours, mean ± "
        "standard error over seeds, and a verdict on each claim. [Reproducing the paper](../reproduction.md) explains "
        "how to read the pages and how to make what is missing.",
        markdown_table(Grid(title="", header=("page", "what", "state", "claims"), lines=lines)),
    ]
    if results.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in results.notes)]
    path = folder / INDEX
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path
