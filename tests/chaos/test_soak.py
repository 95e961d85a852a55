"""Many faults under load: killed replicas, frozen gateways, a hung and emptied Redis, and clients that hang up.

Every request must get a whole answer. A stream that a killed replica had begun may end with an error event instead.
Afterwards no request stays counted.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.chaos.stage import Stage
from tests.cluster.clients import Load, held_stream, running_load
from tests.cluster.gateways import GatewayProcess, another_gateway
from tests.polling import eventually

pytestmark = pytest.mark.slow

SOAK_S = 30.0


class Chaos:
    """Causes one trouble after another. Each is over before the next begins; the seed decides the order."""

    def __init__(self, stage: Stage, third: GatewayProcess, seed: int) -> None:
        self._stage = stage
        self._third = third
        self._rng = random.Random(seed)
        self.history: list[str] = []

    async def rage(self, for_s: float) -> None:
        troubles: list[Callable[[], Awaitable[None]]] = [
            self._kill_a_replica,
            self._freeze_a_gateway,
            self._hang_redis,
            self._empty_redis,
            self._freeze_a_gateway_while_redis_hangs,
        ]
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            trouble = self._rng.choice(troubles)
            self.history.append(trouble.__name__)
            await trouble()
            sums = await self._stage.ledger.sums()
            assert not sums.problems(), (self.history, sums.problems())

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, longest_s))

    async def _kill_a_replica(self) -> None:
        replica = self._rng.choice(self._stage.cluster.replicas)
        replica.kill()
        await self._pause(1)
        replica.start()
        await eventually(lambda: self._stage.listens(replica.url))

    async def _freeze_a_gateway(self) -> None:
        index = self._rng.randrange(3)
        self._signal_gateway(index, signal.SIGSTOP)
        await self._pause(4)  # a lease lasts 3 s
        self._signal_gateway(index, signal.SIGCONT)

    def _signal_gateway(self, index: int, number: signal.Signals) -> None:
        if index == 2:
            self._third.signal(number)
        else:
            self._stage.cluster.signal_gateway(index, number)

    async def _hang_redis(self) -> None:
        self._stage.redis.pause()
        await self._pause(2)
        self._stage.redis.resume()

    async def _empty_redis(self) -> None:
        self._stage.redis.kill()
        await self._pause(1)
        self._stage.redis.start()

    async def _freeze_a_gateway_while_redis_hangs(self) -> None:
        index = self._rng.randrange(3)
        self._signal_gateway(index, signal.SIGSTOP)
        await self._hang_redis()
        await self._pause(1)
        self._signal_gateway(index, signal.SIGCONT)


async def hang_up_again_and_again(stage: Stage, urls: list[str], seed: int) -> None:
    """A client that hangs up before the end of almost every answer."""
    rng = random.Random(seed)
    while True:
        try:
            async with asyncio.timeout(rng.uniform(0.01, 0.5)):
                async with held_stream(stage.http, rng.choice(urls), stage.new_prompt()) as stream:
                    await stream.rest()
        except (TimeoutError, StopAsyncIteration, httpx.TransportError):
            continue


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_happens_requests_are_answered_and_nothing_stays_counted(stage: Stage, seed: int) -> None:
    async with another_gateway(stage.cluster, "third") as third:
        urls = [*stage.urls, third.url]
        chaos = Chaos(stage, third, seed)
        load = Load(stage.http, urls, seed=seed, max_tokens=(1, 20))
        async with running_load(load, clients=12):
            impatient = asyncio.ensure_future(hang_up_again_and_again(stage, urls, seed))
            try:
                await chaos.rage(SOAK_S)
            finally:
                impatient.cancel()
                stage.heal_processes()
                third.signal(signal.SIGCONT)
        assert load.failures == [], chaos.history
        assert load.broken <= 12 * chaos.history.count("_kill_a_replica"), "a kill breaks what it finds, and no more"
        assert load.answered > 100
        await eventually(stage.all_load_is_given_back)
        await eventually(lambda: ownership_adds_up(stage))
        await eventually(lambda: everyone_serves_through_the_store(stage, urls))


async def ownership_adds_up(stage: Stage) -> bool:
    return not await stage.ledger.ownership_problems()


async def everyone_serves_through_the_store(stage: Stage, urls: list[str]) -> bool:
    answers = [await stage.ready(url) for url in urls]
    return all(answer["store"] == "up" and len(answer["replicas"]) == 3 for answer in answers)
