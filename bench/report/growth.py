"""How the cost of one request grows with gateways and workers (`bench.fleet --grid`).

    python -m bench.report.growth [--results bench/results/fleet-grid.json] [--out docs/evidence/growth.svg]

draws the same plot for the documentation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter
from pydantic import BaseModel, TypeAdapter

from bench.report.figures import figure, save, style
from bench.report.inputs import Results, Unreadable, read
from bench.report.tables import Column, Group, Line, number, percent, table
from bench.tables import counted

_COLOURS = ("#2f81f7", "#d98200", "#3fb950", "#bc8cff")
_COLUMNS = (
    Column("Gateways"),
    Column("A gateway's CPU for a request (µs)"),
    Column("Redis' CPU for a request (µs)"),
    Column("Each gateway at rest"),
    Column("Redis at rest"),
    Column("Bytes into Redis for a request"),
    Column("Bytes out"),
)


class GrowthRow(BaseModel, frozen=True):
    """One size of the fleet (`bench.fleet.growth.measure`)."""

    gateways: int
    workers: int
    gateways_us: float
    redis_us: float
    resting_gateway_core: float
    resting_redis_core: float
    redis_in_bytes: float
    redis_out_bytes: float


def render(results: Results) -> str:
    rows = _rows(results)
    with style():
        drawn, told = _drawn(rows)
        caption = "CPU time for one request, without what gateways and Redis use at rest."
        chart = figure("growth", drawn, told, caption)
    groups = [
        Group([_line(row) for row in rows if row.workers == workers], f"{workers} replicas")
        for workers in sorted({row.workers for row in rows})
    ]
    return chart + table("The cost of one request by the size of the fleet", _COLUMNS, groups)


def _rows(results: Results) -> list[GrowthRow]:
    return results.rows_as(TypeAdapter(list[GrowthRow]))


def _line(row: GrowthRow) -> Line:
    return Line(
        [
            number(row.gateways),
            number(row.gateways_us),
            number(row.redis_us),
            percent(row.resting_gateway_core, 1),
            percent(row.resting_redis_core, 1),
            number(row.redis_in_bytes),
            number(row.redis_out_bytes),
        ]
    )


def _drawn(rows: Sequence[GrowthRow]) -> tuple[Figure, str]:
    """The plots, and their text for those who cannot see them."""
    drawn = Figure(figsize=(10, 3.4))
    panels = drawn.subplots(1, 3)
    parts: tuple[tuple[str, str, Callable[[GrowthRow], float]], ...] = (
        ("Gateways", "ms for a request", lambda row: row.gateways_us / 1000),
        ("Redis", "ms for a request", lambda row: row.redis_us / 1000),
        ("Redis at rest", "% of a core", lambda row: row.resting_redis_core * 100),
    )
    told = [_panel(axes, rows, *part) for axes, part in zip(panels, parts, strict=True)]
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return drawn, " ".join(told)


def _panel(axes: Axes, rows: Sequence[GrowthRow], title: str, unit: str, value: Callable[[GrowthRow], float]) -> str:
    told = []
    for colour, gateways in zip(cycle(_COLOURS), sorted({row.gateways for row in rows}), strict=False):
        points = sorted((row.workers, value(row)) for row in rows if row.gateways == gateways)
        name = counted(gateways, "gateway")
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=name)
        told.append(f"{name}: {', '.join(f'{x}: {found:.2f}' for x, found in points)}")
    axes.set(xlabel="replicas", ylabel=unit, title=title, xscale="log", ylim=(0, None))
    axes.set_xticks(sorted({row.workers for row in rows}), minor=False)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    return f"{title}, {unit}, by replicas. {'; '.join(told)}."


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results/fleet-grid.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/growth.svg"))
    options = parser.parse_args()
    try:
        results = read(options.results)
    except Unreadable as error:
        parser.error(f"--results: {options.results} is not what bench.fleet --grid writes: {error}")
    if results is None:
        parser.error(f"--results: there is no file {options.results}")
    with style():
        save(_drawn(_rows(results))[0], options.out)
    print(options.out)


if __name__ == "__main__":
    main()
