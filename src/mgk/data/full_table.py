"""A table whose cells are shown in full however narrow the terminal is."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def full_table(*names: str, **options: Any) -> Table:
    """Return a table with these columns, whose long words go on in the next line.

    By default rich cuts them, and the name of a row or of a file that is cut cannot be copied.
    """
    table = Table(*names, **options)
    for column in table.columns:
        column.overflow = "fold"
    return table
