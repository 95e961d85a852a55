"""The gain from KV outside the GPU (bench.offload), beside published results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from statistics import median

from pydantic import TypeAdapter

from bench.offload.measure import Row
from bench.offload.published import PUBLISHED, Figure
from bench.offload.stages import Tier
from bench.report import FAILED_SHARE
from bench.report.inputs import Results
from bench.report.tables import Column, Group, Line, number, percent, table, text
from bench.scaled_time import why_invalid

_COLUMNS = (
    Column("Tier, tokens of a chunk", numeric=False),
    Column("Seeds"),
    Column("TTFT p50 (ms)", "lower"),
    Column("p95 (ms)", "lower"),
    Column("Mean (ms)", "lower"),
    Column("Requests per s", "higher"),
    Column("Prompt tokens per s", "higher"),
    Column("On GPU"),
    Column("Loaded"),
    Column("Stored (GB)"),
    Column("Read from Redis (GB)"),
    Column("Failed", "lower"),
    Column("Valid", numeric=False),
)
_SHARES = "On GPU, loaded: of the prompts' tokens."


def render(results: Results) -> str:
    by_scenario: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows_as(TypeAdapter(list[Row])):
        by_scenario.setdefault((row.scenario, row.engine), []).append(row)
    return "".join(_scenario(name, engine, rows) for (name, engine), rows in by_scenario.items())


def _scenario(name: str, engine: str, rows: Sequence[Row]) -> str:
    runs: dict[Tier, list[Row]] = {}
    for row in (row for row in rows if row.valid):
        runs.setdefault(Tier(row.tier, row.chunk_tokens), []).append(row)
    lines = [_line(tier.label, str(len(found)), found, "yes") for tier, found in runs.items()]
    lines += [_invalid_line(row) for row in rows if not row.valid]
    groups = [Group(lines, "Measured")]
    if published := [_published_line(figure) for figure in PUBLISHED if figure.scenario == name]:
        groups.append(Group(published, "Published, of other machines and versions"))
    title = f"{name}, {engine}"
    caption = f"{title}: medians over seeds; invalid runs one by one, in no median. {_SHARES}"
    return f"<h3>{escape(title)}</h3>" + table(caption, _COLUMNS, groups)


def _line(label: str, seeds: str, rows: Sequence[Row], valid: str) -> Line:
    def middle(figure: Callable[[Row], float]) -> float | None:
        return median(figure(row) for row in rows if row.ttft_ms) if any(row.ttft_ms for row in rows) else None

    failed = sum(row.failed for row in rows)
    cells = [
        text(label),
        text(seeds),
        number(middle(lambda row: row.percentile_ms(0.5))),
        number(middle(lambda row: row.percentile_ms(0.95))),
        number(middle(lambda row: row.mean_ms)),
        number(middle(lambda row: row.per_s), 2),
        number(middle(lambda row: row.prompt_tokens_per_s)),
        percent(middle(lambda row: row.gpu_share), 1),
        percent(middle(lambda row: row.loaded_share), 1),
        number(middle(lambda row: row.stored_gb), 2),
        number(middle(lambda row: row.fetched_bytes / 1e9), 2),
        number(failed),
        text(valid),
    ]
    return Line(cells, competes=failed <= FAILED_SHARE * sum(row.requests for row in rows))


def _invalid_line(row: Row) -> Line:
    why = f"invalid: {why_invalid(row.requests, row.idle)}"
    line = _line(Tier(row.tier, row.chunk_tokens).label, f"seed {row.seed}", [row], why)
    return Line(line.cells, "invalid", competes=False)


def _published_line(figure: Figure) -> Line:
    variant = f", {figure.variant}" if figure.variant else ""
    cells = [
        text(f"{figure.by}: {Tier(figure.tier, figure.chunk_tokens).label}{variant}"),
        number(None),
        *(number(ms) for ms in (figure.p50_ms, figure.p95_ms, figure.mean_ms)),
        number(figure.per_s, 2),
        number(figure.prompt_tokens_per_s),
        *(number(None) for _ in range(2)),
        number(figure.stored_gb, 1),
        *(number(None) for _ in range(2)),
        text(""),
    ]
    return Line(cells, "reference", competes=False)
