"""The ledger of usage: every call of a writer is added once, whatever the store loses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis.asyncio as redis

from coordinator.keys import usage_key
from coordinator.store import Store, StoreOptions
from coordinator.usage import Consumed, Hour, Row, UsageStore
from tests.coordinator.stage import running
from tests.redis_server import RedisServer

KEPT_S = 3 * 3600
CHAT = Row("research", "alice", "chat")
TOOK = Consumed(1, 0, 700, 300, 50, 2, 1_234_567_891, 270_000)


def hour(number: int) -> Hour:
    return Hour(f"2026-11-28T{number:02d}+0000", 1_795_824_000 + 3600 * number)


@pytest.fixture
async def store(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Store]:
    async with running(Store(StoreOptions(redis_server.url, budget_s=5.0), "gw0")) as store:
        yield store


@pytest.fixture
def usage(store: Store) -> UsageStore:
    return UsageStore(store, "", "gw0.1")


async def test_what_gateways_add_is_summed_with_money_exact_to_nine_decimals(
    store: Store, usage: UsageStore, client: redis.Redis
) -> None:
    other, more = UsageStore(store, "", "gw1.1"), replace(TOOK, cost_nanos=9_000_000 * 10**9, saved_nanos=999_730_000)
    assert await usage.add(0, 1, {hour(1): {CHAT: TOOK}}, KEPT_S) == 1
    assert await other.add(0, 1, {hour(1): {CHAT: more}}, KEPT_S) == 1
    assert await usage.rows(hour(1).name) == {CHAT: Consumed(2, 0, 1400, 600, 100, 4, 9_000_001_234_567_891, 10**9)}
    assert await client.hvals(f"{usage_key()}:{hour(1).name}") == ["2 0 1400 600 100 4 9000001.234567891 1.000000000"]


async def test_a_call_that_comes_twice_or_too_early_adds_nothing_and_tells_the_last_number(usage: UsageStore) -> None:
    rows = {hour(1): {CHAT: TOOK}}
    assert await usage.add(0, 1, rows, KEPT_S) == 1
    assert await usage.add(0, 1, rows, KEPT_S) == 1
    assert await usage.add(2, 3, rows, KEPT_S) == 1
    assert await usage.add(1, 1, {}, KEPT_S) == 1
    assert await usage.rows(hour(1).name) == {CHAT: TOOK}


async def test_names_of_any_characters_are_told_apart(usage: UsageStore) -> None:
    rows = dict.fromkeys((Row("", "", ""), Row("-", "a b", "%2D"), Row("others", "ü\n", "Qwen/Qwen2.5-7B")), TOOK)
    await usage.add(0, 1, {hour(1): rows}, KEPT_S)
    assert await usage.rows(hour(1).name) == rows


async def test_when_an_hour_begins_two_that_are_too_old_go_whatever_the_clock_does(usage: UsageStore) -> None:
    for number in range(1, 8):
        await usage.add(number - 1, number, {hour(number): {CHAT: TOOK}}, KEPT_S)
    assert await usage.hours() == [hour(number).name for number in (3, 4, 5, 6, 7)]
    assert await usage.rows(hour(2).name) == {}
    far = Hour("2036-01-01T00+0000", hour(7).start_s + 10 * 365 * 86_400)
    for number, name in enumerate((far, far, hour(8)), 8):  # a clock that jumps ahead, and is set back
        await usage.add(number - 1, number, {name: {CHAT: TOOK}}, KEPT_S)
    assert await usage.hours() == [*(hour(number).name for number in (5, 6, 7, 8)), far.name]


async def test_rows_above_a_thousand_count_as_those_of_one_key(usage: UsageStore) -> None:
    many = {Row("research", f"k{number}", "chat"): TOOK for number in range(1010)}
    await usage.add(0, 1, {hour(1): many}, KEPT_S)
    rows = await usage.rows(hour(1).name)
    assert len(rows) == 1001
    assert rows[Row("research", "others", "chat")].requests == 10
    assert sum(row.requests for row in rows.values()) == 1010


async def test_writers_that_call_no_more_are_forgotten_when_there_are_many(store: Store, client: redis.Redis) -> None:
    writers = f"{usage_key()}:writers"
    await client.hset(writers, mapping={f"old{number}": f"3 {number}" for number in range(1000)} | {"#": "1000"})
    usage = UsageStore(store, "", "gw0.1")
    await usage.add(0, 1, {hour(1): {CHAT: TOOK}}, KEPT_S)
    left = await client.hgetall(writers)
    assert len(left) == 901
    assert "old50" not in left
    assert left["gw0.1"] == "1 1001"


async def test_rows_and_keys_that_cannot_be_read_stop_nobody(usage: UsageStore, client: redis.Redis) -> None:
    base = usage_key()
    await client.hset(f"{base}:{hour(1).name}", mapping={"research alice chat": "x", "a": "1"})
    await client.set(f"{base}:writers", "x")
    await client.set(f"{base}:hours", "x")
    assert await usage.add(0, 1, {hour(1): {CHAT: TOOK}}, KEPT_S) == 1
    assert await usage.rows(hour(1).name) == {CHAT: TOOK}
    assert await usage.hours() == [hour(1).name]
