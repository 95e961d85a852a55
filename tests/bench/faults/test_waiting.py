"""bench.faults: what is judged of the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from bench.faults.queue import Look, over_cap, queue_keys, waited
from bench.faults.redis import Line
from bench.faults.verdicts import End, Seen
from coordinator.keys import PoolKeys
from tests.redis_server import RedisServer, running_redis

KEYS, OTHER = PoolKeys("pool"), PoolKeys("other")


def look(at_s: float, **active: int) -> Look:
    return Look(at_s, active, waiting=0)


def placed(state: str, sent_s: float, ended_s: float, waited_s: float = 0.0) -> Seen:
    return Seen(sent_s, End.COMPLETE, ended_s, replica="r0", state=state, waited_s=waited_s)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def line(server: RedisServer) -> AsyncIterator[Line]:
    line = Line(server.url)
    yield line
    await line.close()


def test_a_replica_is_over_its_cap_with_more_requests_than_were_placed_without_the_store() -> None:
    looks = [look(1.0, r0=4, r1=4), look(2.0, r0=5, r1=3), look(3.0, r0=5, r1=5), look(9.0, r0=5)]
    assert over_cap(looks, [], cap=4) == [2.0, 3.0, 9.0]
    assert over_cap(looks, [placed("exact", 0.0, 10.0)], cap=4) == [2.0, 3.0, 9.0]
    assert over_cap(looks, [placed("fallback", 0.0, 4.0)], cap=4) == [3.0, 9.0], "one explains one"
    assert over_cap(looks, [placed("fallback", 0.0, 4.0), placed("fallback", 2.5, 8.8)], cap=4) == []


def test_requests_that_waited_are_counted_among_those_that_could() -> None:
    seen = [placed("exact", 0, 1, 0.5), placed("exact", 0, 1), placed("fallback", 0, 1), placed("fallback", 0, 3, 1.0)]
    assert waited(seen) == (2, 3)
    assert waited([]) == (0, 0)


async def test_every_key_of_the_queue_of_this_pool_that_is_left_is_named(line: Line) -> None:
    for keys in (KEYS, OTHER):
        await line.ask("HSET", keys.active, "r0", 1)
    assert await queue_keys(line, KEYS) == []
    of_gateways = (KEYS.seats, KEYS.charges, KEYS.grants, KEYS.heard)
    for key in (KEYS.waiting, KEYS.fair, KEYS.paces, *(of("g.1") for of in of_gateways), OTHER.waiting):
        await line.ask("SET", key, "")
    await line.ask("SET", KEYS.waiting.replace("waiting", "turns:1 digest"), "")
    await line.ask("SET", KEYS.waiting.replace("waiting", "line:1 digest tenant"), "")
    assert await queue_keys(line, KEYS) == [
        "charges:g.1",
        "fair",
        "grants:g.1",
        "heard:g.1",
        "line:1 digest tenant",
        "paces",
        "seats:g.1",
        "turns:1 digest",
        "waiting",
    ]
