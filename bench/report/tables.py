"""Tables as HTML, with the best value of each column emphasised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

_THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"
_WHAT_IS_BETTER = {"lower": "\N{DOWNWARDS ARROW}", "higher": "\N{UPWARDS ARROW}"}


Kind = Literal["", "ours", "reference", "invalid"]


@dataclass(frozen=True)
class Column:
    """`better` says which values of the column win. Empty: the column has no winner."""

    title: str
    better: Literal["lower", "higher", ""] = ""
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """The shown text, and its number if the cell can be compared."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Line:
    """A row. The first cell is its header. `kind` is its CSS class."""

    cells: Sequence[Cell]
    kind: Kind = ""
    competes: bool = True


@dataclass(frozen=True)
class Group:
    """Lines that compete with each other."""

    lines: Sequence[Line]
    title: str = ""


def text(words: str) -> Cell:
    return Cell(words)


def number(value: float | None, digits: int = 0, *, compared: bool = True) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}")
    return Cell(grouped(value, digits), value if compared else None)


def grouped(value: float, digits: int = 0) -> str:
    """Groups of three digits: 1 500."""
    return f"{value:,.{digits}f}".replace(",", _THIN_SPACE)


def percent(value: float | None, digits: int = 0) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}")
    return Cell(f"{value * 100:.{digits}f}{_THIN_SPACE}%", value)


def table(caption: str, columns: Sequence[Column], groups: Sequence[Group]) -> str:
    head = "".join(_head(column) for column in columns)
    bodies = "".join(_body(columns, group) for group in groups)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>{bodies}</table></div>"
    )


def _head(column: Column) -> str:
    shown = escape(column.title)
    if column.better:
        words = f"{column.better} is better"
        shown += f' <span class="better" title="{words}" aria-label="({words})">{_WHAT_IS_BETTER[column.better]}</span>'
    return f'<th scope="col"{_number_class(column)}>{shown}</th>'


def _number_class(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def _body(columns: Sequence[Column], group: Group) -> str:
    title = ""
    if group.title:
        title = f'<tr class="group"><th scope="rowgroup" colspan="{len(columns)}">{escape(group.title)}</th></tr>'
    best = [_best(column, i, group.lines) for i, column in enumerate(columns)]
    return f"<tbody>{title}{''.join(_row(columns, line, best) for line in group.lines)}</tbody>"


def _best(column: Column, i: int, lines: Sequence[Line]) -> str | None:
    """The text of the column's best cell, since equal texts are equally good. None if the column has no winner."""
    cells = [line.cells[i] for line in lines if line.competes and line.cells[i].value is not None]
    if not column.better or len({cell.text for cell in cells}) < 2:
        return None
    pick = min if column.better == "lower" else max
    return pick(cells, key=lambda cell: cell.value or 0.0).text


def _row(columns: Sequence[Column], line: Line, best: Sequence[str | None]) -> str:
    cells = []
    for i, (column, cell) in enumerate(zip(columns, line.cells, strict=True)):
        shown = escape(cell.text)
        if line.competes and cell.value is not None and cell.text == best[i]:
            shown = f"<strong>{shown}</strong>"
        tag = '<th scope="row"' if i == 0 else "<td"
        cells.append(f"{tag}{_number_class(column)}>{shown}</{tag[1:3]}>")
    kind = f' class="{line.kind}"' if line.kind else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"
