"""A second attempt is placed at once, where there is room, within one allowance for all gateways."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.accounts import AccountLimits, Limits
from coordinator.errors import NoRoom, OverLimit
from coordinator.placement import NOTHING, Placement, PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.hedged import FirstBytes, tell
from coordinator.pool.pool import Pool
from tests.coordinator.queueing import ONE_EACH, asking, fill, queued, two_gateways
from tests.coordinator.stage import KEYS, SPAN_TOKENS, beaten, drained, now_ms
from tests.redis_server import RedisServer

MUCH = 10**6
HOUR_MS = 3_600_000
KNOBS = PolicyKnobs(max_active_requests=2)
TOKENS = SPAN_TOKENS
"""Of a prompt."""


def second(
    name: str, first: Placement, knobs: PolicyKnobs = KNOBS, max_share: float = 1.0, most_tokens: int = MUCH
) -> PlaceRequest:
    """A second attempt, whose prompt no replica has."""
    asked = asking(name, knobs)
    asked.tried, asked.hedge = [first.replica], (max_share, most_tokens)
    return asked


async def placed(pool: Pool, asked: PlaceRequest) -> Placement:
    placement = await pool.place(asked)
    assert isinstance(placement, Placement)
    return placement


async def refused(pool: Pool, asked: PlaceRequest) -> str:
    with pytest.raises(NoRoom) as refusal:
        await pool.place(asked)
    return refusal.value.reason


async def test_gateways_share_one_allowance(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as gateways:
        first = await placed(gateways[0], asking("first", KNOBS))
        for gateway in gateways:
            await tell(gateway.run, 10 * TOKENS, {})
        for number in range(8):  # of 20 prompts that were placed, a quarter is 5, but for what has faded
            asked, gateway = second(f"second{number}", first, max_share=0.25), gateways[number % 2]
            if number < 4:
                assert (await placed(gateway, asked)).replica != first.replica
                gateway.done(asked.reservation)
                await drained(*gateways)
            else:
                assert await refused(gateway, asked) == "withheld"
        assert set(await client.hgetall(KEYS.flight("gw0"))) == {"first"}


async def test_a_second_attempt_leaves_no_trace_where_it_may_not_go(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        first = await placed(one, asking("first", KNOBS))
        await tell(one.run, MUCH, {})
        assert await refused(one, second("later", first, most_tokens=TOKENS - 1)) == "later"
        assert await refused(one, second("no_share", first, max_share=0.0)) == "withheld"
        everybody = second("everybody", first)
        everybody.tried = ["r0", "r1", "r2"]
        assert await refused(one, everybody) == "no_replica"
        for each in ("r0", "r1", "r2"):
            await client.hset(KEYS.breakers, each, "5 1 1")
        assert await refused(one, second("probe", first)) == "no_room"
        await client.delete(KEYS.breakers)
        assert set(await client.hgetall(KEYS.flight("gw0"))) == {"first"}
        assert await client.exists(KEYS.waiting, KEYS.seats("gw0")) == 0
        assert float(await client.hget(KEYS.hedges, "hedged")) == 0


async def test_nobody_gets_a_second_attempt_without_room_or_while_requests_wait(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        first = await placed(one, asking("first", ONE_EACH))
        await tell(one.run, MUCH, {})
        await fill(other, 2)
        assert await refused(one, second("no_room", first, ONE_EACH)) == "no_room"
        task = await queued(client, other, asking("waits"))
        assert await refused(one, second("overtakes", first)) == "no_room", "although there is room for a second one"
        task.cancel()


async def test_a_second_attempt_has_to_fit_into_the_limits_but_is_no_second_request(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        await tell(one.run, MUCH, {})
        first = await placed(one, asking("first", KNOBS))
        for name, fits in (("fits", True), ("fits not", False)):
            beside = second(name, first)
            beside.limits = Limits((AccountLimits("t", 2, 1, 2 * TOKENS),), 2 * TOKENS)
            beside.has_counted()
            if fits:
                assert await placed(one, beside)
            else:
                with pytest.raises(OverLimit):
                    await other.place(beside)
        one.done("fits", NOTHING)
        await drained(one)
        assert {name.split(" ")[0] for name in await client.hkeys(KEYS.tenants)} == {"tokens"}, "none is in flight"


async def test_a_replica_that_is_late_at_several_gateways_counts_as_slow_for_all(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as gateways:
        await client.hset(KEYS.rates, mapping=dict.fromkeys(("r0", "r1", "r2"), 8000))
        on_time, late = FirstBytes(0, 9), FirstBytes(2, 2)
        assert await tell(gateways[0].run, 0, {"r0": late, "r1": FirstBytes(3, 9)}) == {"r0": False, "r1": False}
        assert await tell(gateways[1].run, 0, {"r0": late, "r1": on_time}) == {"r0": True, "r1": False}
        await beaten(gateways[1])
        assert await client.hgetall(KEYS.speeds) == {"?": "134", "r0": "34", "r1": "134", "r2": "134"}
        first = await placed(gateways[0], asking("first", KNOBS))
        assert first.replica != "r0"
        assert (await tell(gateways[0].run, 0, {"r0": on_time}))["r0"], "for a while"


async def test_after_redis_clock_went_back_a_replica_counts_as_slow_no_longer_than_if_it_were_late_now(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        now = await now_ms(client)
        await client.hset(KEYS.late, "r0", f"3.000 3.000 {now + HOUR_MS} {now + HOUR_MS}")
        assert await tell(one.run, 0, {"r0": FirstBytes(0, 9)}) == {"r0": True}
        until_ms = int((await client.hget(KEYS.late, "r0")).split(" ")[3])
        assert until_ms < now + HOUR_MS / 60


async def test_a_replica_that_was_well_is_slow_when_one_first_byte_after_the_other_is_late(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        await tell(one.run, 0, {"r0": FirstBytes(1, 12)})
        told = [await tell(each.run, 0, {"r0": FirstBytes(1, 1)}) for each in (one, other, one)]
        assert [each["r0"] for each in told] == [False, False, True]


async def test_whatever_the_key_holds_a_second_attempt_is_refused_or_made(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        first = await placed(one, asking("first", KNOBS))
        for field in ("placed", "hedged", "at_ms"):
            for garbage in ("garbage", "9e99", "-1", "nan", str(10**14)):
                await client.hset(KEYS.hedges, field, garbage)
                await tell(one.run, 1, {})
        await client.delete(KEYS.hedges)
        await client.set(KEYS.hedges, "text")
        assert await refused(one, second("second", first)) == "withheld"
        await tell(one.run, MUCH, {})
        assert (await placed(one, second("made", first))).replica != first.replica
