"""Tables in a terminal of 80 columns. Words may take two lines, figures are never cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def counted(number: int, what: str) -> str:
    """`1 gateway`, `2 gateways`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def table(title: str, words: Sequence[str], figures: Sequence[str], caption: str | None = None) -> Table:
    """A table with a column for each name: first the words, then the figures."""
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        made.add_column(name, overflow="fold")
    for name in figures:
        made.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    return made
