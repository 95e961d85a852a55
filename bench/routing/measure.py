"""One run of a mix through a system, with the figures of engines and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import aiohttp

from bench import scaled_time
from bench.load import Result, percentile, run
from bench.machine import IdleShare
from bench.routing.fleets import Counters, Fleet, cache_share
from bench.routing.mixes import Mix, Workload
from bench.routing.systems import System
from gateway.tasks import Tasks

WRONG = (
    "answers whose cached tokens differ from the prediction by over a block. Reasons: blocks were evicted or computed "
    "while the request waited; or no event had told of the prompt, and its tokens were estimated"
)
_LOOK_S = 0.1
_WINDOW_LOOKS = 10


@dataclass(frozen=True)
class Row:
    """The results of a run. If the engines' times are scaled, all times are converted back, a router's own time too."""

    engine: str
    mix: str
    system: str
    instances: int
    seed: int
    requests: int
    failed: int
    """Failed requests, including those before the measurement."""
    ttft_ms: list[float]
    per_s: float
    cache_share: float
    split: list[float]
    """Each replica's share of the requests."""
    wrong_share: float | None
    """The share of wrong predictions among the answers with a prediction. None if there was no prediction."""
    peak_load: float | None
    """The highest ratio of a replica's requests to the mean, at times when it had the most and its queue grew. None if
    there were no such times."""
    idle: float
    valid: bool

    def percentile_ms(self, share: float) -> float:
        return percentile(self.ttft_ms, share)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def measure(fleet: Fleet, mix: Mix, workload: Workload, system: System, seed: int) -> Row:
    """Raises DoesNotStart if the system does not start."""
    async with system.start(fleet, workload.sessions, seed) as spread:
        warmed_up = await run(workload.warm_up, spread, mix.concurrency, None, fleet.model)
        before, idle = fleet.counters(), IdleShare()
        async with _sampled(fleet) as sampler:
            result = await run(
                workload.sessions, spread, mix.concurrency, workload.order, fleet.model, fleet.block_tokens
            )
        idle_share = idle()
        counted = [now.since(then) for now, then in zip(fleet.counters(), before, strict=True)]
    result.failed += warmed_up.failed
    return _row(fleet, mix, system, seed, result, counted, idle_share, sampler.peak_load())


def _row(
    fleet: Fleet,
    mix: Mix,
    system: System,
    seed: int,
    result: Result,
    counted: Sequence[Counters],
    idle_share: float,
    peak_load: float | None,
) -> Row:
    answered = max(1.0, sum(each.requests for each in counted))
    return Row(
        engine=fleet.engine,
        mix=mix.name,
        system=system.name,
        instances=system.instances,
        seed=seed,
        requests=result.requests,
        failed=result.failed,
        ttft_ms=scaled_time.ttft_ms(result, fleet.speed),
        per_s=scaled_time.per_s(result, fleet.speed),
        cache_share=round(cache_share(counted), 5),
        split=[round(each.requests / answered, 4) for each in counted],
        wrong_share=round((result.over + result.under) / result.predicted, 5) if result.predicted else None,
        peak_load=None if peak_load is None else round(peak_load, 3),
        idle=round(idle_share, 3),
        valid=scaled_time.is_valid(result, fleet.speed, idle_share),
    )


class QueueSampler:
    """Samples each replica's queue."""

    def __init__(self, replicas: int) -> None:
        self.active: list[list[int]] = [[] for _ in range(replicas)]
        self.waiting: list[list[int]] = [[] for _ in range(replicas)]

    def peak_load(self) -> float | None:
        looks = len(self.active[0])
        peaks: list[float] = []
        for first in range(0, looks - _WINDOW_LOOKS + 1, _WINDOW_LOOKS // 2):
            window = slice(first, first + _WINDOW_LOOKS)
            loads = [mean(active[window]) for active in self.active]
            for load, waiting in zip(loads, self.waiting, strict=True):
                if load == max(loads) > 0 and waiting[window][-1] > waiting[window][0]:
                    peaks.append(load / mean(loads))
        return max(peaks, default=None)


@asynccontextmanager
async def _sampled(fleet: Fleet) -> AsyncIterator[QueueSampler]:
    sampler, tasks = QueueSampler(len(fleet.urls)), Tasks()
    async with aiohttp.ClientSession() as http:

        async def sample() -> None:
            while True:
                for at, url in enumerate(fleet.urls.values()):
                    async with http.get(f"{url}/sim/load") as response:
                        load = await response.json()
                    sampler.active[at].append(load["running"] + load["waiting"])
                    sampler.waiting[at].append(load["waiting"])
                await asyncio.sleep(_LOOK_S)

        if fleet.engine == "simulated":
            tasks.spawn(sample(), "queue sampler")
        try:
            yield sampler
        finally:
            await tasks.close()
