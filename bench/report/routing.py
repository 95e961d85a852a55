"""The results of each mix of requests (bench.routing)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from pydantic import TypeAdapter

from bench.report import FAILED_SHARE
from bench.report.inputs import Results
from bench.report.routing_figures import cache_shares, ttft_distributions
from bench.report.runs import Measured, measured
from bench.report.tables import Cell, Column, Group, Kind, Line, number, percent, table, text
from bench.routing.measure import WRONG, Row
from bench.routing.systems import label
from bench.scaled_time import why_invalid

_COLUMNS = (
    Column("System", numeric=False),
    Column("Instances"),
    Column("Seeds"),
    Column("TTFT p50 (ms)", "lower"),
    Column("p95 (ms)", "lower"),
    Column("p99 (ms)", "lower"),
    Column("Requests per s", "higher"),
    Column("Cache share", "higher"),
    Column("Split (%)"),
    Column("Predicted wrong", "lower"),
    Column("Failed", "lower"),
    Column("Idle CPU"),
    Column("Valid", numeric=False),
)


def render(results: Results) -> str:
    by_mix: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows_as(TypeAdapter(list[Row])):
        by_mix.setdefault((row.mix, row.engine), []).append(row)
    return "".join(_mix(f"{mix}, {engine}", rows) for (mix, engine), rows in by_mix.items())


def _mix(title: str, rows: Sequence[Row]) -> str:
    valid = measured([row for row in rows if row.valid])
    invalid = [row for row in rows if not row.valid]
    lines = [_line(each) for each in valid] + [_invalid_line(row) for row in invalid]
    caption = f"{title}: medians over seeds; invalid runs one by one, in no median. Predicted wrong: {WRONG}."
    drawn = ttft_distributions(title, valid) + cache_shares(title, valid) if valid else ""
    return f"<h3>{escape(title)}</h3>{drawn}" + table(caption, _COLUMNS, [Group(lines)])


def _line(each: Measured) -> Line:
    requests = sum(row.requests for row in each.rows)
    failed = sum(row.failed for row in each.rows)
    cells = [
        text(label(each.system, 1)),
        number(each.instances or None),
        number(len(each.rows)),
        *_percentiles(each.rows),
        number(each.middle(lambda row: row.per_s), 1),
        percent(each.middle(lambda row: row.cache_share), 1),
        _split([row.split for row in each.rows]),
        _wrong(each.rows),
        number(failed),
        percent(each.middle(lambda row: row.idle)),
        text("yes"),
    ]
    kind: Kind = "ours" if each.is_ours else "reference" if each.is_reference else ""
    fails_too_often = failed > FAILED_SHARE * requests
    return Line(cells, kind, competes=not each.is_reference and not fails_too_often)


def _invalid_line(row: Row) -> Line:
    cells = [
        text(label(row.system, 1)),
        number(row.instances or None),
        text(f"seed {row.seed}"),
        *_percentiles([row]),
        number(row.per_s, 1),
        percent(row.cache_share, 1),
        _split([row.split]),
        _wrong([row]),
        number(row.failed),
        percent(row.idle),
        text(f"invalid: {why_invalid(row.requests, row.idle)}"),
    ]
    return Line(cells, "invalid", competes=False)


def _percentiles(rows: Sequence[Row]) -> list[Cell]:
    """Medians over the runs with answers."""
    answered = [row for row in rows if row.ttft_ms]
    if not answered:
        return [number(None)] * 3
    found_ms = [median(row.percentile_ms(share) for row in answered) for share in (0.5, 0.95, 0.99)]
    return [number(ms, 0 if ms >= 100 else 1) for ms in found_ms]


def _split(splits: Sequence[Sequence[float]]) -> Cell:
    """Each run's largest share first, because chance decides which replica has it."""
    ranked = [sorted(split, reverse=True) for split in splits]
    middle = [median(parts) for parts in zip(*ranked, strict=False)]
    return text(" / ".join(f"{part * 100:.0f}" for part in middle))


def _wrong(rows: Sequence[Row]) -> Cell:
    known = [row.wrong_share for row in rows if row.wrong_share is not None]
    return percent(median(known) if known else None, 1)
