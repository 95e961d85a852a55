"""A gateway process tells the store what it has counted, exactly once, whatever the store loses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreError
from coordinator.keys import usage_key
from coordinator.store import Store, StoreOptions
from coordinator.usage import Consumed, Hour, Row, Rows, UsageStore
from gateway.billing.hours import Hours
from gateway.billing.ledger import Ledger
from gateway.billing.prices import TokenCounts
from gateway.settings.billing_settings import BillingSettings
from tests.coordinator.stage import running
from tests.redis_server import RedisServer, running_redis

BERLIN = ZoneInfo("Europe/Berlin")
SETTINGS = BillingSettings.model_validate(
    {
        "time_zone": "Europe/Berlin",
        "prices": [
            {"model": "chat", "uncached_input_per_mtok": 1.0, "cached_input_per_mtok": 0.1, "output_per_mtok": 4.0}
        ],
    }
)
CHAT = Row("research", "alice", "chat")
TOOK = TokenCounts(700, 300, 50)
COST = 700_000 + 30_000 + 200_000
NOON_S = datetime(2026, 11, 28, 12, 30, tzinfo=BERLIN).timestamp()
NOON = "2026-11-28T12+0100"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def store(server: RedisServer, client: redis.Redis) -> AsyncIterator[Store]:
    async with running(Store(StoreOptions(server.url, budget_s=5.0), "gw0")) as store:
        yield store


class LossyStore(UsageStore):
    """Loses replies: what was sent may have been done or not."""

    loses_replies = False

    async def add(self, before: int, number: int, rows: Rows, kept_s: int) -> int:
        known = await super().add(before, number, rows, kept_s)
        if self.loses_replies:
            raise StoreError("the connection broke")
        return known


@pytest.fixture
def lossy(store: Store) -> LossyStore:
    return LossyStore(store, "", "gw0.1")


@pytest.fixture
def ledger(lossy: LossyStore) -> Ledger:
    return Ledger(SETTINGS, lossy)


def count(ledger: Ledger, times: int = 1, time_s: float = NOON_S) -> None:
    for _ in range(times):
        ledger.count(time_s, CHAT, TOOK, 0, is_error=False)


async def requests(store: UsageStore) -> int:
    return sum([row.requests for hour in await store.hours() for row in (await store.rows(hour)).values()])


async def test_a_request_is_counted_with_its_cost_and_what_the_cache_saved(ledger: Ledger, lossy: LossyStore) -> None:
    assert ledger.count(NOON_S, CHAT, TOOK, 2, is_error=False) == COST
    assert ledger.count(NOON_S, CHAT, None, 2, is_error=True) == 0
    assert ledger.count(NOON_S, Row("research", "alice", "small"), TOOK, 0, is_error=False) == 0
    await ledger.flush()
    assert await lossy.rows(NOON) == {
        CHAT: Consumed(2, 1, 700, 300, 50, 2, COST, 270_000),
        Row("research", "alice", "small"): Consumed(1, 0, 700, 300, 50),
    }


async def test_a_call_whose_reply_was_lost_is_repeated_and_counts_once(ledger: Ledger, lossy: LossyStore) -> None:
    count(ledger, 3)
    lossy.loses_replies = True
    for _ in range(3):
        with pytest.raises(StoreError):
            await ledger.flush()
        count(ledger)
    lossy.loses_replies = False
    await ledger.close()
    assert await requests(lossy) == 6


async def test_an_emptied_store_gets_everything_back_also_from_a_gateway_without_news(
    store: Store, ledger: Ledger, lossy: LossyStore, client: redis.Redis
) -> None:
    other = Ledger(SETTINGS, UsageStore(store, "", "gw1.1"))
    for each in (ledger, other, ledger):
        count(each, 5)
        await each.flush()
    for _ in range(2):
        await client.flushall()
        count(ledger)
        for each in (ledger, other, ledger):
            await each.flush()
    assert await requests(lossy) == 17


async def test_a_store_with_older_data_gets_what_it_lacks(
    ledger: Ledger, lossy: LossyStore, client: redis.Redis
) -> None:
    """As after a failover to a copy that lags, also to one from before the store was emptied."""
    hour, writers = f"{usage_key()}:{NOON}", f"{usage_key()}:writers"
    count(ledger, 2)
    await ledger.flush()
    old = await client.hgetall(hour), await client.hgetall(writers)
    for empties in (False, True):
        for _ in range(3):
            count(ledger)
            await ledger.flush()
        if empties:
            await client.flushall()
            count(ledger)
            await ledger.flush()
        await client.hset(hour, mapping=old[0])
        await client.hset(writers, mapping=old[1])
        count(ledger)
        await ledger.flush()
        assert await requests(lossy) == (12 - 1 if empties else 6)


async def test_a_full_store_takes_it_all_the_same(ledger: Ledger, lossy: LossyStore, client: redis.Redis) -> None:
    count(ledger)
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            await client.set("x", "y")
        await ledger.flush()
    finally:
        await client.config_set("maxmemory", 0)
    assert await requests(lossy) == 1


async def test_many_rows_are_told_again_in_pieces_and_an_interruption_costs_nothing(
    ledger: Ledger, lossy: LossyStore, client: redis.Redis
) -> None:
    for number in range(1200):
        ledger.count(NOON_S + 3600 * (number % 3), Row("research", f"k{number}", "chat"), TOOK, 0, is_error=False)
    await ledger.flush()
    await client.flushall()
    add, calls = lossy.add, 0

    async def breaking(before: int, number: int, rows: Rows, kept_s: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            count(ledger)
            raise StoreError("away")
        return await add(before, number, rows, kept_s)

    lossy.add = breaking  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        await ledger.flush()
    await ledger.close()
    assert await requests(lossy) == 1201


async def test_thousands_of_tenants_are_told_after_an_outage(ledger: Ledger, lossy: LossyStore) -> None:
    for number in range(9000):
        ledger.count(NOON_S, Row(f"t{number}", "key", "chat"), TOOK, 0, is_error=False)
    await ledger.flush()
    rows = await lossy.rows(NOON)
    assert len(rows) == 9000
    assert rows[Row("t8999", "others", "chat")].requests == 1


async def test_a_store_that_is_away_for_long_costs_bounded_memory_and_the_end_does_not_wait_for_it(
    server: RedisServer,
) -> None:
    ledger = Ledger(SETTINGS, UsageStore(Store(StoreOptions("redis://127.0.0.1:1", 0.02), "gw0"), "", "gw0.1"))
    for hour in range(30):
        for number in range(1100):
            ledger.count(NOON_S + 3600 * hour, Row("t", f"k{number}", "chat"), TOOK, 0, is_error=False)
    assert sum(len(rows) for rows in ledger._new.values()) == 26 * 1001
    async with asyncio.timeout(5):
        await ledger.close()


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN), "2026-10-25T02+0200"),
        (datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN), "2026-10-25T02+0100"),
        (datetime(2026, 3, 29, 3, 0, tzinfo=BERLIN), "2026-03-29T03+0200"),
        (datetime(2026, 11, 30, 23, 59, 59, tzinfo=BERLIN), "2026-11-30T23+0100"),
        (datetime(2026, 12, 1, tzinfo=BERLIN), "2026-12-01T00+0100"),
    ],
)
def test_an_hour_is_named_in_its_time_zone_and_the_hour_that_comes_twice_has_two_names(
    moment: datetime, name: str
) -> None:
    hour = Hours(BERLIN).at(moment.timestamp())
    assert hour == Hour(name, int(moment.timestamp()) // 3600 * 3600)


async def test_a_clock_that_crosses_an_hour_in_both_directions_loses_nothing_and_counts_nothing_twice(
    ledger: Ledger, lossy: LossyStore, client: redis.Redis
) -> None:
    midnight_s = datetime(2026, 12, 1, tzinfo=BERLIN).timestamp()
    for offset_s in (-1, 1, -1, 40 * 86_400, -2, 3):
        count(ledger, time_s=midnight_s + offset_s)
        await ledger.flush()
    await client.flushall()
    await ledger.flush()
    by_hour = {hour: (await lossy.rows(hour))[CHAT].requests for hour in await lossy.hours()}
    assert by_hour == {"2026-11-30T23+0100": 3, "2026-12-01T00+0100": 2, "2027-01-10T00+0100": 1}


def test_a_copy_of_what_was_consumed_has_all_its_figures() -> None:
    consumed = Consumed(1, 2, 3, 4, 5, 6, 7, 8)
    assert consumed.copy() == consumed
    assert consumed.copy() is not consumed
