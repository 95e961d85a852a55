"""The cost of a placement in Redis (bench.place)."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from pydantic import TypeAdapter

from bench.place import MOST_GROWTH, Row, growth
from bench.report.figures import OURS, PEER, figure, style
from bench.report.inputs import Results
from bench.report.tables import Cell, Column, Group, Line, number, table, text

_COLOURS = {"known": "#d98200", "shared": PEER, "new": OURS}
_COLUMNS = (
    Column("Keys in the chain"),
    Column("Case", numeric=False),
    Column("Script (µs)"),
    Column("Of the smallest fleet's"),
    Column("Round trip p50 (µs)"),
    Column("Round trip p99 (µs)"),
)


def render(results: Results) -> str:
    rows = results.rows_as(TypeAdapter(list[Row]))
    groups = [
        Group([_line(rows, row) for row in rows if row.replicas == replicas], f"{replicas} replicas")
        for replicas in sorted({row.replicas for row in rows})
    ]
    return _chart(rows) + table("What a placement costs", _COLUMNS, groups)


def _line(rows: Sequence[Row], row: Row) -> Line:
    return Line(
        [
            number(row.keys),
            text(row.case),
            number(row.script_us),
            _growth(rows, row),
            number(row.round_trip_p50_us),
            number(row.round_trip_p99_us),
        ]
    )


def _growth(rows: Sequence[Row], row: Row) -> Cell:
    times = growth(rows, row)
    return text(f"{'met' if times <= MOST_GROWTH else 'missed'}: {times:.2f}")


def _chart(rows: Sequence[Row]) -> str:
    lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault((row.replicas, row.case), []).append((row.keys, row.script_us))
    told = []
    with style():
        drawn = Figure(figsize=(10, 3.8))
        axes = drawn.add_subplot()
        fewest = min(replicas for replicas, _ in lines)
        for (replicas, case), points in lines.items():
            keys, costs_us = zip(*sorted(points), strict=True)
            label = f"{replicas} replicas, {case}"
            dash = "--" if replicas == fewest else "-"
            axes.plot(keys, costs_us, dash, color=_COLOURS.get(case, PEER), marker="o", markersize=4, label=label)
            told.append(f"{label}: {', '.join(f'{k} keys {us:.0f}' for k, us in sorted(points))}")
        axes.set(xlabel="keys in the chain", ylabel="script time (µs)", xlim=(0, None), ylim=(0, None))
        axes.set_xticks(sorted({row.keys for row in rows}))
        handles, labels = axes.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside right center")
        alt = f"Script time of a placement in microseconds by chain length. {'; '.join(told)}."
        caption = "The script's own time in Redis, of the mean call, against the length of the chain."
        return figure("place", drawn, alt, caption)
