"""The results of bench.store: flat rows, with a table for each kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import TypeAdapter

from bench.report.inputs import Results, Scalar
from bench.report.tables import Cell, Column, Group, Line, number, table, text

_LOWER_IS_BETTER = ("_us", "_ms", "_s", "_bytes")


def render(results: Results) -> str:
    rows = results.rows_as(TypeAdapter(list[dict[str, Scalar]]))
    kinds = dict.fromkeys(str(row.get("what", "")) for row in rows)
    return "".join(_table(kind, [row for row in rows if str(row.get("what", "")) == kind]) for kind in kinds)


def _table(kind: str, rows: Sequence[dict[str, Scalar]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "what"))
    columns = [_column(name, (row.get(name) for row in rows)) for name in names]
    lines = [Line([_cell(row.get(name)) for name in names], competes=False) for row in rows]
    return table(kind or "Every row of the file", columns, [Group(lines)])


def _column(name: str, values: Iterable[Scalar]) -> Column:
    numeric = all(value is None or _is_number(value) for value in values)
    better: Literal["lower", "higher", ""] = ""
    if numeric and name.endswith("per_s"):
        better = "higher"
    elif numeric and name.endswith(_LOWER_IS_BETTER):
        better = "lower"
    return Column(name.replace("_", " "), better, numeric)


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Scalar) -> Cell:
    if isinstance(value, bool):
        return text("yes" if value else "no")
    if isinstance(value, str):
        return text(value)
    if value is None or float(value).is_integer():
        return number(value)
    return number(value, 1 if abs(value) >= 100 else 3)
