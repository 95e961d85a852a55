"""A peer's run: sessions over a fleet of workers, through 1 to 8 gateways, and straight to random workers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bench.fleet.load import Load, Spread
from bench.fleet.settings import LightSettings
from bench.fleet.stage import Stage, stage
from bench.fleet.traffic import Shape
from bench.machine import IdleShare
from gateway.settings.policies import DEFAULT_POLICY

ENGINE = LightSettings(
    block_tokens=256,
    num_blocks=1_200_000 // 256,
    max_running=80,
    prefill_tokens_per_s=80_000.0,
    decode_s_per_token=0.0043,
    tokens_per_chunk=128,
)
"""The peer's worker (the profiles of SHAPES have the same): ten times as fast as a real engine."""

_FIRST_RATE_PER_S = 10.0
_STEP_FACTOR, _STEP_S = 1.4, 8.0
STEP_PACE = 50.0
_LEAST_IDLE, _LATEST_S = 0.15, 0.25
_BEFORE_S, _IDLE_BEFORE = 3.0, 0.5
_CARRIED_SHARE = 0.8
"""A run lasts longer than a step, and its answers are in flight together."""


@dataclass(frozen=True)
class Run:
    """One run. Its sessions begin at `sessions_per_s` in all."""

    shape: Shape
    workers: int
    gateways: int
    sessions_per_s: float
    sessions: int
    engine: LightSettings
    pace: float
    """Divides all times of workers and clients."""
    system: str = DEFAULT_POLICY
    """A policy of KVGate, or a peer's router. It has no meaning without gateways."""
    seed: int = 1

    @classmethod
    def at_rate(
        cls,
        shape: Shape,
        workers: int,
        gateways: int,
        sessions_per_s: float,
        sessions: int,
        pace: float | None = None,
        **more: Any,
    ) -> Run:
        """A run on the peer's workers. Without a `pace`, each worker is as busy as there at the peer's rate."""
        pace = pace or (sessions_per_s / workers) / (shape.sessions_per_s / shape.workers)
        return cls(shape, workers, gateways, sessions_per_s, sessions, ENGINE, pace, **more)

    @property
    def settings(self) -> LightSettings:
        return self.engine.at_speed(self.pace)

    def described(self) -> dict[str, Any]:
        return {
            "system": self.system if self.gateways else "random worker",
            "gateways": self.gateways,
            "workers": self.workers,
            "sessions_per_s": self.sessions_per_s,
            "pace": round(self.pace, 4),
            "seed": self.seed,
        }


def spread_over(staged: Stage, seed: int) -> Spread:
    """Each request goes to any gateway. Without gateways, it goes to any worker."""
    rng = random.Random(seed)
    if staged.gateway_urls:
        return lambda: (rng.choice(staged.gateway_urls), "")
    workers = [(url, worker) for worker, url in staged.fleet.urls.items()]
    return lambda: rng.choice(workers)


async def measure(run: Run, staged: Stage) -> dict[str, Any]:
    """Runs it on this stage. Returns its row."""
    load = load_of(run, staged)
    async with staged.meter.measured() as used:
        outcome = await load.run(run.sessions_per_s, run.sessions)
    figures = outcome.figures(list(staged.fleet.urls))
    return {**run.described(), **figures, **used.figures(len(outcome.sent)), **outcome.reasons()}


def load_of(run: Run, staged: Stage) -> Load:
    settings = staged.settings
    spread = spread_over(staged, run.seed)
    return Load(run.shape, spread, settings.served_name, settings.block_tokens, run.pace, run.seed)


def staged_for(run: Run, discovers: bool = False) -> AbstractContextManager[Stage]:
    """The stage of a run."""
    return stage(run.workers, run.gateways, run.settings, run.system, discovers)


async def carried_sessions_per_s(shape: Shape, staged: Stage, tell: Callable[[str], None]) -> float:
    """The rate of sessions that this machine carries: of growing rates, a part of the last one at which processors and
    clients have time left. Pauses and engines are fast meanwhile, so that a step ends soon."""
    carried = rate_per_s = _FIRST_RATE_PER_S
    workers = len(staged.fleet.urls)
    before = IdleShare()
    await asyncio.sleep(_BEFORE_S)
    if (share := before()) < _IDLE_BEFORE:
        tell(f"without requests, the machine is only {share:.0%} idle: something else runs here")
    for seed in itertools.count(1):
        sessions = round(rate_per_s * _STEP_S)
        run = Run.at_rate(shape, workers, 1, rate_per_s, sessions, STEP_PACE, seed=seed)
        load, idle = load_of(run, staged), IdleShare()
        outcome = await load.run(run.sessions_per_s, run.sessions)
        share = idle()
        tell(f"{rate_per_s:.0f} sessions/s: {share:.0%} idle, {sum(outcome.errors.values())} errors")
        if share < _LEAST_IDLE or outcome.latest_s > _LATEST_S or outcome.errors:
            break
        carried, rate_per_s = rate_per_s, rate_per_s * _STEP_FACTOR
    return round(carried * _CARRIED_SHARE, 1)
