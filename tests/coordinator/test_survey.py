"""The survey reads all facts of a Redis as a read-only user, and the pools as KVGate's own user."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown
from coordinator.pool.draining import drain
from coordinator.pool.pool import Pool
from coordinator.redis.checks import SampledKey
from coordinator.survey import Survey
from tests.coordinator.stream import Stream
from tests.coordinator.test_acl import RULES
from tests.redis_server import RedisServer

COMMANDS = (
    "ping",
    "info",
    "time",
    "config|get",
    "dbsize",
    "randomkey",
    "pttl",
    "strlen",
    "hgetall",
    "smembers",
    "xread",
)
READS = ("reset", "on", ">secret", "allkeys", "-@all", *(f"+{name}" for name in COMMANDS))


@asynccontextmanager
async def surveying(server: RedisServer, client: redis.Redis, rules: tuple[str, ...]) -> AsyncIterator[Survey]:
    """A survey as a user with these rules."""
    await client.execute_command("ACL", "SETUSER", "reader", *rules)
    survey = await Survey.open(server.url.replace("redis://", "redis://reader:secret@"), 5.0)
    try:
        yield survey
    finally:
        await survey.close()
        await client.execute_command("ACL", "DELUSER", "reader")


async def test_a_user_that_may_only_read_learns_all_of_it(redis_server: RedisServer, client: redis.Redis) -> None:
    await client.set("chunk", "x" * 1000)
    await client.set("mortal", "x", ex=60)
    await client.rpush("list", "x")
    await client.set("kvgate:{m}:turn", 1)
    try:
        async with surveying(redis_server, client, READS) as survey:
            server = await survey.redis()
    finally:
        await client.delete("chunk", "mortal", "list")
    assert server.refused == {}
    assert server.info is not None
    assert server.info.version_text
    assert server.info.policy == "noeviction"
    assert server.hash_value_limit_bytes == 64
    assert server.keys == 4
    assert set(server.sampled_keys) == {
        SampledKey("chunk", False, 1000),
        SampledKey("mortal", True, 1),
        SampledKey("list", False, 0),
    }
    assert 0 < server.ping_ms < 1000


def test_the_documented_user_is_the_one_that_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    documented = re.search(r"ACL SETUSER doctor on >PASSWORD allkeys -@all (.*?)```", text, flags=re.DOTALL)
    assert documented is not None
    assert documented[1].split() == [f"+{name}" for name in COMMANDS]


async def test_its_clock_is_bounded_from_both_sides(redis_server: RedisServer, client: redis.Redis) -> None:
    async with surveying(redis_server, client, READS) as survey:
        began = time.monotonic()
        low_s, high_s = (await survey.redis()).clock_ahead_s
        took_s = time.monotonic() - began
    assert low_s <= 0.001  # Redis' time is cut to milliseconds
    assert high_s >= -0.001
    assert high_s - low_s <= took_s


async def test_what_kvgates_own_user_may_not_ask_is_told_as_refused(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with surveying(redis_server, client, (*RULES, "+info")) as survey:
        server = await survey.redis()
        pools, snapshot = await survey.pools(), await survey.snapshot("m")
    assert set(server.refused) == {"CONFIG", "DBSIZE", "RANDOMKEY"}
    assert server.info is not None
    assert server.info.version_text
    assert (server.hash_value_limit_bytes, server.sampled_keys) == (None, ())
    assert (pools, snapshot.state.replicas) == ([], {})


async def test_a_user_that_may_not_see_chunks_is_told_so(redis_server: RedisServer, client: redis.Redis) -> None:
    await client.set("chunk", "x")
    rules = tuple("~kvgate:*" if rule == "allkeys" else rule for rule in READS)
    try:
        async with surveying(redis_server, client, rules) as survey:
            assert "RANDOMKEY" in (await survey.redis()).refused
    finally:
        await client.delete("chunk")


async def test_a_snapshot_shows_agents_and_leases(
    stream: Stream, pool: Pool, redis_server: RedisServer, client: redis.Redis
) -> None:
    await pool.beat()
    async with surveying(redis_server, client, READS) as survey:
        assert "m" in await survey.pools()
        snapshot = await survey.snapshot("m")
        assert set(snapshot.state.replicas) == {"r0", "r1"}
        assert snapshot.state.is_exact("r0")
        assert snapshot.gateway_leases_ms["gw0"] > snapshot.state.now_ms


async def test_a_snapshot_shows_slow_replicas_and_the_drains_of_the_present_incarnations(
    stream: Stream, pool: Pool, redis_server: RedisServer, client: redis.Redis
) -> None:
    await drain(pool.run, "r1")
    await client.hset(pool.keys.draining, mapping={"r0": "another-life 1", "r9": "gone 1", "r8": "unreadable"})
    await client.hset(pool.keys.late, mapping={"r0": f"3 3 1 {10**14}", "r1": "3 3 1 1", "r8": "unreadable"})
    async with surveying(redis_server, client, READS) as survey:
        snapshot = await survey.snapshot("m")
    assert snapshot.slow == ("r0",)
    assert snapshot.drained_since_ms.keys() == {"r1"}
    assert 0 <= snapshot.state.now_ms - snapshot.drained_since_ms["r1"] < 60_000


async def test_a_redis_that_is_away_or_wants_a_password_cannot_be_surveyed(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    with pytest.raises(StoreDown):
        await Survey.open("redis://127.0.0.1:1", 1.0)
    with pytest.raises(StoreDown):
        await Survey.open(redis_server.url.replace("redis://", "redis://nobody:wrong@"), 1.0)
