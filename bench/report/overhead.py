"""The cost of a request in each proxy (bench.overhead)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from bench.report import FAILED_SHARE
from bench.report.figures import INK, OURS, PEER, figure, style
from bench.report.inputs import OverheadRow, Results
from bench.report.tables import Cell, Column, Group, Kind, Line, grouped, number, percent, table, text

_BASELINE = "direct"
"""No proxy. Added latency is the difference to this."""
_PANELS, _PANELS_A_ROW = 12, 3
_CUT = 4
"""A bar is cut at this many medians. Otherwise one proxy with a hundred times the cost would hide the others."""
_COLUMNS = (
    Column("Proxy", numeric=False),
    Column("CPU a request (µs)", "lower"),
    Column("Redis' CPU (µs)"),
    Column("Together (µs)", "lower"),
    Column("Requests per s", "higher"),
    Column("Added p50 (ms)", "lower"),
    Column("Added p99 (ms)", "lower"),
    Column("Failed", "lower"),
    Column("Machine idle"),
)


def render(results: Results) -> str:
    by_load: dict[str, list[OverheadRow]] = {}
    for row in results.rows_as(TypeAdapter(list[OverheadRow])):
        by_load.setdefault(_load(row), []).append(row)
    groups = [Group(_lines(rows), load) for load, rows in by_load.items()]
    return _chart(by_load) + table("What a request costs, by load: medians over rounds", _COLUMNS, groups)


def is_ours(contender: str) -> bool:
    return contender.startswith("kvgate") or "picker" in contender


def _load(row: OverheadRow) -> str:
    pace = f"{grouped(row.rate_per_s)} requests/s" if row.rate_per_s else f"{row.connections} clients"
    return f"{row.prompt}, {row.answer}, {pace}"


def _lines(rows: Sequence[OverheadRow]) -> list[Line]:
    base = next((row for row in rows if row.contender == _BASELINE), None)
    return [_line(row, base) for row in rows]


def _line(row: OverheadRow, base: OverheadRow | None) -> Line:
    kind: Kind
    if row is base:
        latency = [number(row.first_byte_p50_ms, 2), number(row.first_byte_p99_ms, 2)]
        name, kind, costs = "direct (its own)", "reference", [number(None)] * 3
    else:
        latency = _added(row, base)
        name, kind = row.contender, "ours" if is_ours(row.contender) else ""
        costs = [number(us, _digits(us)) for us in (row.cpu_us, row.store_cpu_us, _total_us(row))]
    cells = [
        text(name),
        *costs,
        number(row.per_s, _digits(row.per_s), compared=not row.rate_per_s),
        *latency,
        number(row.failed),
        percent(row.idle),
    ]
    fails_too_often = row.failed > FAILED_SHARE * (row.requests + row.failed)
    return Line(cells, kind, competes=row is not base and not fails_too_often)


def _added(row: OverheadRow, base: OverheadRow | None) -> list[Cell]:
    if base is None:
        return [number(None), number(None)]
    return [
        number(row.first_byte_p50_ms - base.first_byte_p50_ms, 2),
        number(row.first_byte_p99_ms - base.first_byte_p99_ms, 2),
    ]


def _digits(value: float) -> int:
    return 1 if 0 < value < 100 else 0


def _total_us(row: OverheadRow) -> float:
    return row.cpu_us + row.store_cpu_us


def _chart(by_load: dict[str, list[OverheadRow]]) -> str:
    compared = {load: [row for row in rows if row.contender != _BASELINE] for load, rows in by_load.items()}
    compared = {load: rows for load, rows in compared.items() if len(rows) > 1}
    shown = sorted(compared, key=lambda load: -len(compared[load]))[:_PANELS]
    if not shown:
        return ""
    slots = [len(compared[load]) for load in shown[::_PANELS_A_ROW]]
    with style():
        drawn = Figure(figsize=(10.5, sum(0.6 + 0.2 * each for each in slots)))
        grid = drawn.add_gridspec(len(slots), _PANELS_A_ROW, height_ratios=slots)
        for i, load in enumerate(shown):
            place = divmod(i, _PANELS_A_ROW)
            _panel(drawn.add_subplot(grid[place]), load, compared[load], slots[place[0]])
        left_out = f" {len(shown)} of {len(by_load)} loads; the table has all." if len(shown) < len(by_load) else ""
        caption = (
            "CPU a request in µs, the paler part is Redis' (proxy + Redis); KVGate in blue. "
            f"Each panel has a scale of its own; a bar with ▸ is cut.{left_out}"
        )
        return figure(f"overhead {shown[0]}", drawn, _alt(compared[load] for load in shown), caption)


def _panel(axes: Axes, load: str, rows: Sequence[OverheadRow], slots: int) -> None:
    totals = [_total_us(row) for row in rows]
    limit = max(total for total in totals if total <= _CUT * median(totals))
    for i, row in enumerate(rows):
        colour = OURS if is_ours(row.contender) else PEER
        total = _total_us(row)
        is_cut = total > limit
        axes.barh(i, min(row.cpu_us, limit * 1.2), color=colour, height=0.72)
        if row.store_cpu_us and not is_cut:
            axes.barh(i, row.store_cpu_us, left=row.cpu_us, color=colour, alpha=0.45, height=0.72)
        words = f"{grouped(row.cpu_us)} + {grouped(row.store_cpu_us)}" if row.store_cpu_us else grouped(row.cpu_us)
        end = limit * 1.2 if is_cut else total
        axes.text(end + limit * 0.03, i, f"▸ {words}" if is_cut else words, va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=8)
    axes.set_ylim(slots - 0.4, -0.6)
    axes.set_xlim(0, limit * 1.65)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_bounds(-0.5, len(rows) - 0.5)
    axes.set_title(load, fontsize=8.5)


def _alt(panels: Iterable[Sequence[OverheadRow]]) -> str:
    told = []
    for rows in panels:
        costs = ", ".join(f"{row.contender} {grouped(_total_us(row))}" for row in sorted(rows, key=_total_us))
        told.append(f"{_load(rows[0])}: {costs}")
    return f"Bar charts of CPU per request in microseconds, Redis included. {'; '.join(told)}."
