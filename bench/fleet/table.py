"""The tables of the fleet's runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench import tables
from gateway.settings.policies import DEFAULT_POLICY

_SHARES = "same_worker", "follow_up_cached", "follow_up_bound", "cached", "bound"


def peer_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line for each run, or for each part of a run."""
    figures = ("same worker", "follow-ups cached", "endless cache", "all cached", "endless cache", "CoV", "errors")
    table = tables.table(title, ("",), figures, _CAPTION)
    for row in rows:
        shares = [f"{row[name]:.4f}" for name in _SHARES]
        table.add_row(_name(row), *shares, f"{row['cov_requests']:.3f}", str(row.get("errors", "")))
    return table


_CAPTION = (
    "same worker: follow-ups on the worker of their first turn. cached: of their prompt tokens. CoV: of requests over "
    "workers."
)


def parts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What each part cost."""
    parts = ("gateways", "redis", "replicas", "clients")
    figures = [f"{part} {unit}" for unit in ("cores", "MB") for part in parts] + ["idle"]
    table = tables.table("CPU and memory of each part", ("",), figures)
    for row in rows:
        cores = [f"{row[f'{part}_core']:.2f}" for part in parts]
        table.add_row(_name(row), *cores, *(f"{row[f'{part}_mb']:.0f}" for part in parts), f"{row['idle']:.0%}")
    return table


def _name(row: dict[str, Any]) -> str:
    if "part" in row:
        return str(row["part"])
    if not row["gateways"]:
        return str(row["system"])
    policy = "" if row["system"] == DEFAULT_POLICY else f", {row['system']}"
    return f"{tables.counted(row['gateways'], 'gateway')}{policy}"


_REST = (
    "gateway ms, Redis ms: for a request, without what they use at rest. The rest of a line is the fleet without "
    "requests: of a core, each gateway and Redis; bytes into and out of Redis."
)


def growth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each size of the fleet."""
    figures = ("gateways", "workers", "gateway ms", "Redis ms", "each gateway", "Redis core", "in kB/s", "out kB/s")
    table = tables.table("The CPU time of one request; and the fleet without requests", (), figures, _REST)
    for row in rows:
        table.add_row(
            str(row["gateways"]),
            str(row["workers"]),
            f"{row['gateways_us'] / 1000:.2f}",
            f"{row['redis_us'] / 1000:.2f}",
            f"{row['resting_gateway_core']:.1%}",
            f"{row['resting_redis_core']:.1%}",
            *(f"{row[name]:.0f}" for name in ("resting_redis_in_kb_s", "resting_redis_out_kb_s")),
        )
    return table
