"""owned_tokens matches the ownership records, whatever happens in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import redis.asyncio as redis
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.agent.residency import Transition
from coordinator.placement import Placement, PlaceRequest
from coordinator.pool.engine_feedback import tell_measured
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, drained, drop, numbers, place, register, replica, request, sweep
from tests.coordinator.stream import (
    RESET,
    Stream,
    attend,
    counted_tokens,
    gains,
    linked,
    losses,
)
from tests.redis_server import RedisServer

CHAINS = [chain("a", "b"), chain("a", "c", "d"), chain("a", "c", "e")]
REPLICAS = ("r0", "r1")

transitions = st.one_of(
    st.tuples(
        st.just("gain"),
        st.sampled_from(CHAINS),
        st.integers(0, 2),
        st.sampled_from(["gpu", "cpu"]),
        st.integers(1, 120),
    ),
    st.tuples(st.just("lose"), st.sampled_from(CHAINS), st.integers(0, 2)),
    st.tuples(st.just("reset")),
)
"""The transitions that an agent may put in one entry."""
replicas = st.sampled_from(REPLICAS)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), replicas, st.sampled_from(CHAINS), st.integers(0, 8)),
        st.tuples(st.just("withdraw"), st.integers(0, 5)),
        st.tuples(st.just("measure"), st.integers(0, 5), st.integers(1, 300)),
        st.tuples(st.just("say"), replicas, st.lists(transitions, min_size=1, max_size=4)),
        st.tuples(st.just("restate"), replicas, st.sampled_from(CHAINS), st.integers(0, 3)),
        st.tuples(st.just("say"), replicas, st.just([("reset",)])),
        st.tuples(st.just("trim the stream"), replicas),
        st.tuples(st.just("register"), replicas, st.sampled_from(["life1", "life2"])),
        st.tuples(st.just("sweep"), replicas),
        st.tuples(st.just("drop"), replicas, st.sampled_from(CHAINS)),
    ),
    min_size=15,
    max_size=45,
)


def spoken(told: Sequence[tuple[Any, ...]]) -> list[Transition]:
    """The transitions of a drawn entry."""
    lines: list[Transition] = []
    for what, *detail in told:
        if what == "gain":
            keys, first, medium, span = detail
            lines += gains(keys, first, medium, span)
        elif what == "lose":
            keys, first = detail
            lines += losses(keys[first:])
        else:
            lines.append(RESET)
    return lines


class Books:
    """Runs the drawn steps."""

    def __init__(self, pool: Pool, client: redis.Redis, streams: dict[str, Stream]) -> None:
        self._pool = pool
        self._client = client
        self._streams = streams
        self._placed: list[tuple[PlaceRequest, Placement]] = []

    async def take(self, what: str, *detail: Any) -> None:
        await getattr(self, what.split(" ")[0])(*detail)
        await drained(self._pool)

    async def place(self, name: str, keys: list[str], seed: int) -> None:
        asked = request(f"{len(self._placed)}", keys, pinned=name, seed=seed)
        self._placed.append((asked, await place(self._pool, asked.reservation, keys, pinned=name, knobs=asked.knobs)))

    async def withdraw(self, index: int) -> None:
        for asked, placement in self._placed[index : index + 1]:
            self._pool.claims.withdraw(asked, placement)

    async def measure(self, index: int, prompt_tokens: int) -> None:
        for asked, placement in self._placed[index : index + 1]:
            await tell_measured(self._pool, asked, placement, prompt_tokens)

    async def say(self, name: str, told: Sequence[tuple[Any, ...]]) -> None:
        if lines := spoken(told):
            await self._streams[name].say(*lines)

    async def restate(self, name: str, keys: list[str], first: int) -> None:
        await self._streams[name].say_all(gains(keys, first), 0)

    async def trim(self, name: str) -> None:
        await self._client.xtrim(KEYS.events(name), maxlen=1, approximate=False)

    async def register(self, name: str, life: str) -> None:
        await self._pool.register(replica(name, life))
        self._streams[name].link.incarnation = life

    async def sweep(self, name: str) -> None:
        await sweep(self._pool, name)

    async def drop(self, name: str, keys: list[str]) -> None:
        await drop(self._pool, self._client, name, keys)


@settings(max_examples=50)
@given(steps=steps)
async def test_owned_tokens_are_the_sum_of_what_the_records_hold(
    redis_server: RedisServer,
    pool: Pool,
    client: redis.Redis,
    steps: list[tuple[Any, ...]],
) -> None:
    await client.delete(*[key async for key in client.scan_iter("kvgate:*")], "none")
    pool.live.clear()
    pool.reassert()
    async with AsyncExitStack() as links:
        streams = {}
        for name in await register(pool, len(REPLICAS)):
            link = await links.enter_async_context(linked(redis_server.url, name))
            await attend(link)
            streams[name] = Stream(link, name)
        books = Books(pool, client, streams)
        for step in steps:
            await books.take(*step)
            assert await numbers(client, KEYS.owned_tokens) == await counted_tokens(client), step
        for name in REPLICAS:
            await sweep(pool, name)
        assert await numbers(client, KEYS.owned_tokens) == await counted_tokens(client, holding_only=True)
