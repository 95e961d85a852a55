"""One measurement: a load on a proxy, and the CPU time of its processes meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import pi, sqrt
from statistics import median, stdev
from typing import Any

from bench.load import percentile
from bench.machine import IdleShare
from bench.overhead.calls import counted_calls
from bench.overhead.client import Measured, Payload, closed_loop, fixed_rate
from bench.overhead.contenders import Running
from bench.overhead.placements import percentile_ms, placements
from bench.overhead.shapes import ANSWERS, payload
from bench.overhead.upstreams import set_answer
from bench.trees import cpu_s, rss_bytes, tree

_COUNTED_S = 3.0


@dataclass(frozen=True)
class Shape:
    """A load. `rate_per_s` 0 means: as fast as `connections` allow."""

    prompt: str
    answer: str
    connections: int
    rate_per_s: float = 0.0


@dataclass(frozen=True)
class Figures:
    """The results. CPU is user and system time of the proxy's whole process tree."""

    requests: int
    failed: int
    per_s: float
    cpu_us: float
    """The proxy's CPU time per request."""
    store_cpu_us: float
    """Redis' CPU time per request."""
    idle: float
    """The machine's idle share. If it is near 0, other processes slowed the proxy down as well."""
    first_byte_p50_ms: float
    first_byte_p99_ms: float
    total_p50_ms: float
    total_p99_ms: float
    rss_mb: float
    """Memory of the proxy's process tree at the end."""
    picker_cpu_us: float = 0.0
    """The part of `cpu_us` that pickers take. The rest is Envoy's, if there are pickers."""
    placement_p50_ms: float = 0.0
    """How long KVGate takes to choose a replica, Redis included; 0 if the proxy is another one."""
    placement_p95_ms: float = 0.0
    calls: float = 0.0
    """The system calls of the proxy's processes per request; 0 if they were not counted."""


@dataclass(frozen=True)
class Compared:
    """One contender beside another one. Each is the median over rounds: if the machine's speed changes, the median of
    ratios errs less than the ratio of medians."""

    cpu_ratio: float
    """CPU per request, divided by that of the other one."""
    cpu_ratio_error: float
    """Standard error of this median; 0 with one round."""
    calls_ratio: float
    """System calls per request, in the same way; 0 if they were not counted."""
    more_bytes: int
    """How much more memory it has, for each connection."""


@dataclass(frozen=True)
class Row:
    """One contender's results for one load."""

    shape: Shape
    contender: str
    figures: Figures
    compared: Compared | None = None

    def as_dict(self) -> dict[str, Any]:
        compared = {} if self.compared is None else asdict(self.compared)
        return {"contender": self.contender, **asdict(self.shape), **asdict(self.figures), **compared}


def median_of(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds that have answers. Requests and failures are sums over all rounds."""
    answered = [one for one in rounds if one.requests] or rounds
    middle = {field.name: median(getattr(one, field.name) for one in answered) for field in fields(Figures)}
    counted = {name: sum(getattr(one, name) for one in rounds) for name in ("requests", "failed")}
    return Figures(**middle | counted)


def compared(rounds: Sequence[Figures], beside: Sequence[Figures], connections: int) -> Compared:
    """Two contenders over the same rounds."""
    pairs = list(zip(rounds, beside, strict=True))
    ratios = [one.cpu_us / other.cpu_us for one, other in pairs]
    error = sqrt(pi / 2 / len(ratios)) * stdev(ratios) if len(ratios) > 1 else 0.0
    calls = [one.calls / other.calls for one, other in pairs if other.calls]
    more_mb = median(one.rss_mb - other.rss_mb for one, other in pairs)
    return Compared(
        cpu_ratio=round(median(ratios), 3),
        cpu_ratio_error=round(error, 4),
        calls_ratio=round(median(calls), 3) if calls else 0.0,
        more_bytes=round(more_mb * 1e6 / max(1, connections)),
    )


def measure(
    shape: Shape, running: Running, control_url: str, warm_up_s: float, seconds: float, counts_calls: bool
) -> Figures:
    """Sets the upstream's answer, warms up, and measures."""
    answer = ANSWERS[shape.answer]
    set_answer(control_url, answer)
    requests = payload(shape.prompt, answer)
    asyncio.run(_load(shape, running, requests, warm_up_s))
    placed = placements(running.kvgate_urls)
    before, idle = _cpu_s(running), IdleShare()
    started = time.perf_counter()
    measured = asyncio.run(_load(shape, running, requests, seconds))
    wall_s = time.perf_counter() - started
    idle_share = idle()
    proxy_s, store_s, picker_s = (now - then for now, then in zip(_cpu_s(running), before, strict=True))
    placed_now, done = placements(running.kvgate_urls), max(1, measured.done)
    return Figures(
        requests=measured.done,
        failed=measured.failed,
        per_s=round(measured.done / wall_s, 1),
        cpu_us=round(proxy_s / done * 1e6, 1),
        store_cpu_us=round(store_s / done * 1e6, 1),
        idle=round(idle_share, 3),
        first_byte_p50_ms=_percentile_ms(measured.first_byte_s, 0.5),
        first_byte_p99_ms=_percentile_ms(measured.first_byte_s, 0.99),
        total_p50_ms=_percentile_ms(measured.total_s, 0.5),
        total_p99_ms=_percentile_ms(measured.total_s, 0.99),
        rss_mb=round(sum(rss_bytes(pid) for pid in tree(running.pids)) / 1e6, 1),
        picker_cpu_us=round(picker_s / done * 1e6, 1),
        placement_p50_ms=percentile_ms(placed, placed_now, 0.5),
        placement_p95_ms=percentile_ms(placed, placed_now, 0.95),
        calls=_calls(shape, running, requests) if counts_calls else 0.0,
    )


def _cpu_s(running: Running) -> tuple[float, float, float]:
    """Of the proxy, of Redis, and of pickers."""
    return cpu_s(running.pids), cpu_s(running.store_pids), cpu_s(running.picker_pids)


def _calls(shape: Shape, running: Running, requests: Payload) -> float:
    """System calls per request. They are counted apart from the time, because counting takes most of it."""
    if not running.pids:
        return 0.0
    with counted_calls(running.pids) as calls:
        measured = asyncio.run(_load(shape, running, requests, _COUNTED_S))
    return round(calls.count / max(1, measured.done), 2)


async def _load(shape: Shape, running: Running, requests: Payload, seconds: float) -> Measured:
    if shape.rate_per_s:
        return await fixed_rate(running.urls, requests, shape.rate_per_s, seconds)
    return await closed_loop(running.urls, requests, shape.connections, seconds)


def _percentile_ms(times_s: list[float], share: float) -> float:
    return round(percentile(times_s, share) * 1000, 3)
