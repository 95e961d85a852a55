"""How the cost of one request grows with gateways and workers: the same modest traffic for every size of the fleet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from bench.fleet.parts import GATEWAYS, REDIS, REPLICAS, Used
from bench.fleet.peer import Run, load_of
from bench.fleet.settings import LightSettings
from bench.fleet.stage import Stage
from bench.fleet.traffic import Shape

SHAPE = Shape(
    system_tokens=1024,
    kinds=16,
    prompt_tokens=((1100, 0.0), (4096, 1.0)),
    answer_tokens=((16, 0.0), (64, 1.0)),
    follow_up_tokens=256,
    follow_up_share=0.5,
    max_turns=2,
    streams=False,
    think_s=1.0,
    sessions_per_s=20.0,
    workers=8,
    seconds=60.0,
)
ENGINE = LightSettings(block_tokens=64, num_blocks=1024)
_SETTLES_S = 3.0
"""After the start, agents and gateways have more to say than later."""


@dataclass(frozen=True)
class Cell:
    """One size of the fleet."""

    gateways: int
    workers: int
    sessions_per_s: float
    seconds: float
    seed: int = 1

    @property
    def run(self) -> Run:
        sessions = round(self.sessions_per_s * self.seconds)
        return Run(SHAPE, self.workers, self.gateways, self.sessions_per_s, sessions, ENGINE, pace=1.0, seed=self.seed)


async def measure(cell: Cell, staged: Stage) -> dict[str, Any]:
    """Measures the fleet without requests, and then with them. What it uses without them is no request's cost."""
    await asyncio.sleep(_SETTLES_S)
    async with staged.meter.measured() as resting:
        await asyncio.sleep(cell.seconds)
    load = load_of(cell.run, staged)
    async with staged.meter.measured() as used:
        outcome = await load.run(cell.sessions_per_s, cell.run.sessions)
    figures = outcome.figures(list(staged.fleet.urls))
    return {
        **cell.run.described(),
        **_resting(resting, cell),
        **used.figures(len(outcome.sent), beside=resting),
        **_bytes_for_one(used, resting, len(outcome.sent)),
        **figures,
        **outcome.reasons(),
    }


def _bytes_for_one(used: Used, resting: Used, requests: int) -> dict[str, float]:
    """The bytes into and out of Redis for one request, without those that go there without requests."""
    times = used.seconds / resting.seconds
    into = used.redis_in_bytes - resting.redis_in_bytes * times
    out = used.redis_out_bytes - resting.redis_out_bytes * times
    return {"redis_in_bytes": round(into / max(1, requests)), "redis_out_bytes": round(out / max(1, requests))}


def _resting(resting: Used, cell: Cell) -> dict[str, float]:
    """The use of each part without requests."""
    figures = resting.figures(0)
    names = [f"{part}_core" for part in (GATEWAYS, REDIS, REPLICAS)] + ["redis_in_kb_s", "redis_out_kb_s"]
    each = {"resting_gateway_core": round(figures[f"{GATEWAYS}_core"] / cell.gateways, 4)}
    return {f"resting_{name}": figures[name] for name in names} | each
