"""One replay of a trace through a system, with the figures of engines and clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, pstdev
from typing import Any

import aiohttp

from bench import scaled_time
from bench.load import BLOCK_TOKENS, MODEL, TIMEOUT_S, NotAnAnswer, Result, Spread, percentile, send
from bench.machine import IdleShare
from bench.replay.fleet import Setup
from bench.replay.prompts import findable_tokens, session
from bench.replay.trace import Trace
from bench.routing.fleets import Counters, Fleet
from bench.routing.systems import System
from bench.workloads import Session

GOALS = ((5.0, 50.0), (20.0, 50.0))
"""The first token within so many seconds, and so many ms on average from each token to the next one."""


@dataclass(frozen=True)
class Row:
    """The results of a replay. All times are those of the recording and of the engines, so a router's own time counts
    `speed` times as much."""

    system: str
    instances: int
    replicas: int
    held: float
    """How many times all caches together hold the trace's distinct blocks."""
    capacity_tokens: int
    """The cache of each replica."""
    rate: float
    """The rate of requests, divided by the recorded one."""
    speed: float
    """All times of the replay were divided by it, and are converted back here."""
    requests: int
    """Answered requests."""
    failed: int
    prompt_tokens: int
    cached_tokens: int
    findable_tokens: int
    """The tokens that one endless cache would have found of the requests that were sent."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    requests_busiest: float
    """The most requests of a replica, divided by the mean."""
    requests_cv: float
    """The coefficient of variation of the replicas' requests."""
    computed_busiest: float
    """The same of the prompt tokens that each replica computed."""
    computed_cv: float
    prefills: int | None
    """Replicas that only compute prompts. None: replicas have no roles, and a prefill delays no tokens."""
    token_p50_ms: float
    """Of the answers' mean times between two tokens of the recording. So is the next one."""
    token_p99_ms: float
    stall_p50_ms: float
    """Of the longest time of each answer without a token. So is the next one."""
    stall_p99_ms: float
    good: tuple[float, ...]
    """The share of the requests that met each of GOALS."""
    late_p99_ms: float
    """How late the client sent a request. It is large where the machine is too slow."""
    idle: float
    valid: bool

    @property
    def of_bound(self) -> float:
        """The share of the findable tokens that was found."""
        return self.cached_tokens / self.findable_tokens if self.findable_tokens else 0.0

    @property
    def cache_share(self) -> float:
        """The share of the prompt tokens that was found."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        shares = {"of_bound": round(self.of_bound, 5), "cache_share": round(self.cache_share, 5)}
        return asdict(self) | shares


async def measure(fleet: Fleet, trace: Trace, setup: Setup, system: System, seed: int) -> Row:
    """Raises DoesNotStart if the system does not start."""
    async with system.start(fleet, [], seed) as spread:
        before, idle = fleet.counters(), IdleShare()
        result, late_s = await _replay(trace, spread, setup)
        idle_share = idle()
        counted = [now.since(then) for now, then in zip(fleet.counters(), before, strict=True)]
    return _row(trace, setup, system, result, late_s, counted, idle_share)


async def _replay(trace: Trace, spread: Spread, setup: Setup) -> tuple[Result, list[float]]:
    """Sends each request at its time, whether earlier ones are answered or not. Also returns how late each was sent, in
    seconds. A failed request is counted and never repeated."""
    result, late_s = Result(), list[float]()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S / min(1.0, setup.speed))

    async def ask(prompt: Session) -> None:
        body = {"model": MODEL, "max_tokens": prompt.max_tokens, "messages": list(prompt.turns[0])}
        asked_s = time.perf_counter()
        try:
            await send(http, body, await spread(prompt, body), asked_s, result, BLOCK_TOKENS)
        except (aiohttp.ClientError, OSError, TimeoutError, NotAnAnswer):
            result.failed += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(trace.requests):
                prompt = session(request, trace.block_tokens, number)
                due_s = started_s + (request.at_ms - trace.requests[0].at_ms) / 1000 / setup.rate / setup.speed
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                late_s.append(time.perf_counter() - due_s)
                group.create_task(ask(prompt))
        result.wall_s = time.perf_counter() - started_s
    return result, late_s


def _row(
    trace: Trace,
    setup: Setup,
    system: System,
    result: Result,
    late_s: Sequence[float],
    counted: Sequence[Counters],
    idle_share: float,
) -> Row:
    excess_ms = setup.first_token_excess_s * 1000
    ttft_ms = [round(each - excess_ms, 2) for each in scaled_time.ttft_ms(result, setup.speed)]
    token_ms = [each * 1000 * setup.speed * setup.tokens_scale for each in result.token_s]
    stall_ms = [each * 1000 * setup.speed for each in result.longest_s]
    requests = [each.requests for each in counted]
    computed = [each.queries_tokens - each.hits_tokens for each in counted]
    return Row(
        system=system.name,
        instances=system.instances,
        replicas=setup.replicas,
        held=setup.held,
        capacity_tokens=setup.capacity_tokens(trace),
        rate=round(setup.rate, 4),
        speed=round(setup.speed, 4),
        requests=result.requests,
        failed=result.failed,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        findable_tokens=findable_tokens(trace),
        ttft_p50_ms=percentile(ttft_ms, 0.5),
        ttft_p95_ms=percentile(ttft_ms, 0.95),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        requests_busiest=busiest(requests),
        requests_cv=variation(requests),
        computed_busiest=busiest(computed),
        computed_cv=variation(computed),
        prefills=setup.prefills,
        token_p50_ms=round(percentile(token_ms, 0.5), 2),
        token_p99_ms=round(percentile(token_ms, 0.99), 2),
        stall_p50_ms=round(percentile(stall_ms, 0.5), 1),
        stall_p99_ms=round(percentile(stall_ms, 0.99), 1),
        good=good(result, token_ms, setup),
        late_p99_ms=round(percentile(late_s, 0.99) * 1000 * setup.speed, 2),
        idle=round(idle_share, 3),
        valid=scaled_time.is_valid(result, setup.speed, idle_share),
    )


def good(result: Result, token_ms: Sequence[float], setup: Setup) -> tuple[float, ...]:
    """The share of all requests that met each of GOALS. A failed one meets none."""
    first_s = [each * setup.speed - setup.first_token_excess_s for each in result.ttft_s]
    answers = list(zip(first_s, token_ms, strict=True))
    sent = max(1, result.requests + result.failed)
    return tuple(
        round(sum(first <= most_s and token <= most_ms for first, token in answers) / sent, 4)
        for most_s, most_ms in GOALS
    )


def busiest(loads: Sequence[float]) -> float:
    """The highest load divided by the mean. 0 without any load."""
    return round(max(loads) / mean(loads), 4) if any(loads) else 0.0


def variation(loads: Sequence[float]) -> float:
    """The coefficient of variation: the standard deviation divided by the mean. 0 without any load."""
    return round(pstdev(loads) / mean(loads), 4) if any(loads) else 0.0
