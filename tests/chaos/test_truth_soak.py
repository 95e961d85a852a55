"""Many faults under traffic: afterwards the map agrees with the caches."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

from bench.cluster import SimReplica
from tests.chaos.truth_load import Askers
from tests.chaos.truth_stage import TruthStage
from tests.polling import eventually

pytestmark = pytest.mark.slow

SOAK_S = 30.0


class Chaos:
    """Causes one trouble after another; the seed decides the order. All but a killed engine heal by themselves, so some
    overlap."""

    def __init__(self, truth: TruthStage, seed: int) -> None:
        self._truth = truth
        self._rng = random.Random(seed)
        self.history: list[str] = []
        self.forgetful: set[str] = set()
        """Replicas whose caches silently forgot blocks."""

    async def rage(self, for_s: float) -> None:
        troubles: list[Callable[[], Awaitable[None]]] = [
            self._kill_an_agent,
            self._freeze_an_agent,
            self._kill_an_engine,
            self._spoil_events,
            self._freeze_redis,
            self._empty_redis,
            self._freeze_a_gateway,
            self._fill_a_cache,
            self._clear_a_cache,
            self._forget_a_cache,
        ]
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            trouble = self._rng.choice(troubles)
            self.history.append(trouble.__name__)
            await trouble()

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, longest_s))

    async def _kill_an_agent(self) -> None:
        agent = self._rng.choice(self._truth.cluster.agents)
        agent.kill()
        await self._pause(1)
        agent.start()

    async def _freeze_an_agent(self) -> None:
        agent = self._rng.choice(self._truth.cluster.agents)
        agent.signal(signal.SIGSTOP)
        await self._pause(4)
        agent.signal(signal.SIGCONT)

    async def _kill_an_engine(self) -> None:
        replica = self._rng.choice(self._truth.cluster.replicas)
        replica.kill()
        replica.start()
        await eventually(lambda: self._truth.listens(replica))

    async def _spoil_events(self) -> None:
        mode = self._rng.choice(["drop_events", "lose_events", "duplicate_events", "delay_events"])
        self.history[-1] += f" {mode}"
        await self._truth.fail(self._rng.choice(self._truth.cluster.replicas), mode, count=self._rng.randint(1, 5))

    async def _freeze_redis(self) -> None:
        self._truth.redis.pause()
        await self._pause(3)
        self._truth.redis.resume()

    async def _empty_redis(self) -> None:
        self._truth.redis.kill()
        await self._pause(1)
        self._truth.redis.start()

    async def _freeze_a_gateway(self) -> None:
        index = self._rng.randrange(2)
        self._truth.cluster.signal_gateway(index, signal.SIGSTOP)
        await self._pause(4)
        self._truth.cluster.signal_gateway(index, signal.SIGCONT)

    async def _fill_a_cache(self) -> None:
        await self._truth.fill(self._rng.choice(self._truth.cluster.replicas), self._rng.randint(50, 250))

    async def _clear_a_cache(self) -> None:
        await self.clear(self._rng.choice(self._truth.cluster.replicas))

    async def clear(self, replica: SimReplica) -> None:
        """The replica's engine drops all its blocks, and publishes it."""
        await self._truth.http.post(f"{replica.url}/reset_prefix_cache")

    async def _forget_a_cache(self) -> None:
        replica = self._rng.choice(self._truth.cluster.replicas)
        self.forgetful.add(replica.id)
        await self._truth.fail(replica, "amnesia")


@pytest.mark.parametrize("seed", [1])
async def test_whatever_happens_the_map_becomes_what_the_caches_hold(truth: TruthStage, seed: int) -> None:
    texts = [truth.new_prompt() for _ in range(24)]
    chaos = Chaos(truth, seed)
    async with Askers(truth, texts, clients=4) as askers:
        await chaos.rage(SOAK_S)
        await truth.heal()
    answered = len(askers.answers)
    assert answered > 100, chaos.history
    # Gateways notice a cache's silent loss after three prompts miss. Here fewer prompts may miss.
    for name in sorted(chaos.forgetful):
        await chaos.clear(truth.replica(name))
    for text in texts:
        await truth.ask(text)
    try:
        await truth.settle(texts, complete=False)
        for text in texts:
            assert not (await truth.ask(text)).is_overpredicted
            await truth.settle(texts, complete=False)  # not all of these prompts fit: each evicts others
        await truth.settle(texts)
    except AssertionError as error:
        error.add_note(f"after {chaos.history}")
        raise
