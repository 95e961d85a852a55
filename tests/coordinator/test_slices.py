"""While much is left of a budget, gateways give out slices of it. It holds over all gateways all the same."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest
import redis.asyncio as redis

from coordinator.errors import OverBudget
from coordinator.placement import NOTHING, Placement
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.spending import FREE, AccountBudget, Bill, Price
from tests.coordinator.queueing import queued, two_gateways
from tests.coordinator.stage import KEYS, beaten, drained, joined, register
from tests.coordinator.test_spending import COST, NAME, budget, costly, dies, placed, spent, took
from tests.polling import eventually
from tests.redis_server import RedisServer

MUCH = budget(10**9)
SLICE = f"slice {NAME}"


async def warm(pool: Pool, count: int = 8, *within: AccountBudget) -> None:
    """So many requests come and go, and the gateway gets slices for as many more."""
    for number in range(count):
        await placed(pool, costly(f"{pool.gateway}-warm{number}", *within or (MUCH,)))
        pool.done(f"{pool.gateway}-warm{number}", took(10))
    await refreshed(pool)


async def refreshed(*pools: Pool) -> None:
    for pool in pools:
        await pool.beat()
    await drained(*pools)


async def slice_of(client: redis.Redis, pool: Pool) -> int:
    """What Redis holds for its slice."""
    entry = await client.hget(KEYS.leased(pool.gateway), SLICE)
    return int(entry.split(" ")[4]) if entry else 0


async def test_requests_on_a_slice_are_placed_and_end_without_a_word_about_budgets(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        await warm(one)
        before = await spent(client)
        assert before == (80, await slice_of(client, one))
        assert before[1] >= 8 * COST
        for number in range(3):
            assert (await placed(one, costly(f"r{number}", MUCH))).spent == ()
        one.done("r0", took(11))
        await drained(one)
        assert await spent(client) == before
        assert await client.hkeys(KEYS.leased("gw0")) == [SLICE]
        assert one.reservations.spent.known(costly("r", MUCH).bill, 10)[0][1:] == (91, COST)
        await refreshed(one)
        settled, held = await spent(client)
        assert (settled, held) == (91, await slice_of(client, one))
        assert held >= 2 * COST
        await refreshed(one)
        *_, held, known, per_s = (await client.hget(KEYS.leased("gw0"), SLICE)).split(" ")
        assert (int(held), int(per_s)) == (2 * COST, 2 * 1000), "nothing came, so it is for what is in flight"
        assert 20 <= int(known) <= 2 * COST, "their prompts, and the tokens of the time until then"
        one.done("r1", took(12))
        one.done("r2", took(13))
        await refreshed(one)
        await refreshed(one)
        assert await spent(client) == (116, 0)
        assert await client.exists(KEYS.leased("gw0")) == 0


async def test_a_request_on_slices_takes_no_more_commands_than_one_without_budgets(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):

        async def commands(name: str, bill: Bill | None) -> dict[str, int]:
            await client.config_resetstat()
            asked = costly(name)
            asked.bill = bill
            assert (await placed(one, asked)).spent == ()
            one.first_token(name)
            one.done(name, took(10))
            await drained(one)
            return {kind: told["calls"] for kind, told in (await client.info("commandstats")).items()}

        await commands("first", None)
        plain = await commands("plain", None)
        assert plain["cmdstat_evalsha"] >= 2
        within = MUCH, budget(10**9, window="2026-11-28")
        await warm(one, 8, *within)
        assert await commands("covered", costly("covered", *within).bill) == plain


async def test_a_request_that_does_not_fit_into_its_gateways_slices_is_asked_about(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        await warm(one)
        assert (await placed(one, costly("long", MUCH, prompt=10_000))).spent
        assert (await placed(one, costly("short", MUCH))).spent == ()
        assert (await placed(one, costly("two", MUCH, budget(10**9, "tokens")))).spent, "one budget has no slice"
        assert (await placed(one, costly("less", budget(10**8)))).spent, "the slice was of another limit"
        assert (await placed(other, costly("elsewhere", MUCH))).spent


async def test_a_half_used_slice_is_stated_at_once(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        await warm(one)
        first = await slice_of(client, one)
        half = one.reservations.spent._sums[NAME].slice.room.amount // COST // 2
        for number in range(half + 1):
            await placed(one, costly(f"r{number}", MUCH))

        async def is_larger() -> bool:
            return await slice_of(client, one) > first

        await eventually(is_larger)


async def test_few_requests_get_no_slice(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        for _ in range(4):
            await warm(one, 3)
            assert await client.exists(KEYS.leased("gw0")) == 0


@pytest.mark.parametrize("prompt_tokens", [0, 10])
async def test_a_request_whose_prompt_nobody_reads_is_asked_about(
    redis_server: RedisServer, prompt_tokens: int
) -> None:
    """It may cost anything, so it is refused as soon as the budget is used up."""
    async with two_gateways(redis_server) as (one, _):
        await warm(one)
        asked = costly("a", MUCH)
        asked.bill = Bill((MUCH,), Price(10**6, 10**5, 10**6), prompt_tokens, 0)
        assert bool((await placed(one, asked)).spent) == (not prompt_tokens)


async def test_a_free_request_is_asked_about_as_long_as_there_is_no_slice(redis_server: RedisServer) -> None:
    """Else its gateway would not know what is left."""
    async with two_gateways(redis_server) as (one, other):
        await warm(one)
        for pool in (one, other):
            asked = costly(f"{pool.gateway}-free", MUCH)
            asked.bill = Bill((MUCH,), FREE, 10, 10)
            assert bool((await placed(pool, asked)).spent) == (pool is other)


async def test_near_the_end_of_a_budget_gateways_give_their_slices_back(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(2000 * COST)
        await warm(one, 8, within)
        assert await slice_of(client, one) > 0
        await placed(other, costly("much", within, prompt=1800 * COST))
        for number in range(8):
            await placed(one, costly(f"r{number}", within))
        await refreshed(one)
        assert await slice_of(client, one) == 8 * COST, "only what is in flight"
        left = 2000 * COST - sum(await spent(client))
        answers = await asyncio.gather(
            *((one, other)[number % 2].place(costly(f"last{number}", within)) for number in range(300)),
            return_exceptions=True,
        )
        assert sum(isinstance(each, Placement) for each in answers) == left // COST
        assert {type(each) for each in answers} == {Placement, OverBudget}


async def test_a_request_that_waits_for_room_leaves_its_slice_and_is_checked_when_it_gets_room(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, 1) as (one, _):
        knobs = PolicyKnobs(max_active_requests=1)
        await warm(one)
        await placed(one, costly("runs", MUCH, knobs=knobs))
        waits = await queued(client, one, costly("waits", MUCH, knobs=knobs))
        assert one.reservations.spent._sums[NAME].slice.in_flight == COST
        one.done("runs", took(1))
        granted = await waits
        assert isinstance(granted, Placement)
        assert granted.spent
        assert "waits" in await client.hkeys(KEYS.leased("gw0"))
        one.done("waits", took(1))
        await refreshed(one)
        await refreshed(one)
        assert await spent(client) == (82, 0)


async def test_a_retry_of_a_request_that_was_asked_about_frees_what_that_held(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        await placed(one, costly("first", MUCH))
        await warm(one)
        assert (await placed(one, costly("second", MUCH, release="first"))).spent == ()
        assert await client.hkeys(KEYS.leased("gw0")) == [SLICE]
        await placed(one, costly("third", MUCH, release="second"))
        one.done("third", NOTHING)
        await refreshed(one)
        await refreshed(one)
        assert await spent(client) == (80, 0)


async def test_of_a_dead_gateways_slice_no_more_counts_than_requests_on_it_can_have_cost_until_it_comes_back(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(10**15)
        bill = Bill((within,), Price(10**6, 10**5, 2 * 10**6), 10, 10**9)
        for number in range(8):
            asked = costly(f"r{number}", within)
            asked.bill = bill
            await placed(one, asked)
            if number:
                one.done(f"r{number}", took(100))
        await refreshed(one)
        asked = costly("covered", within)
        asked.bill = bill
        assert (await placed(one, asked)).spent == ()
        settled, held = await spent(client)
        assert settled == 700
        assert held > 2 * 2 * 10**9
        await dies(client, one, other, 10)
        settled, held = await spent(client)
        assert held == 0
        assert settled > 700 + 2 * 10 + 2 * 8 * 1000, "what was in flight, by its time"
        assert settled < 700 + 100 * (10 + 10 * 1000), "no request computes for longer"
        await beaten(one)  # it was only paused
        await drained(one)
        one.done("r0", took(7))
        one.done("covered", took(8))
        await refreshed(one)
        await refreshed(one)
        assert await spent(client) == (715, 0)


async def test_slices_are_held_again_when_the_store_is_emptied(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        for pool in (one, other):
            await warm(pool)
            assert (await placed(pool, costly(f"{pool.gateway}-runs", MUCH))).spent == ()
            assert (await placed(pool, costly(f"{pool.gateway}-ends", MUCH))).spent == ()
            pool.done(f"{pool.gateway}-ends", took(9))
        await client.flushdb()
        await refreshed(one, other)
        await refreshed(one, other)
        assert await spent(client) == (178, 2 * COST)
        for pool in (one, other):
            pool.done(f"{pool.gateway}-runs", took(1))
        await refreshed(one, other)
        await refreshed(one, other)
        assert await spent(client) == (180, 0)


async def test_a_gateway_that_is_reaped_gets_no_slice_before_it_has_stated_its_requests(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Nobody would reap it again."""
    async with two_gateways(redis_server) as (one, other):
        await warm(one)
        await placed(one, costly("runs", MUCH))
        await dies(client, one, other, 0)
        one.reservations.count_adopted(is_beat=True)
        await drained(one)
        assert SLICE in await client.hkeys(KEYS.leased("gw0"))
        assert "/lost " in await client.hget(KEYS.leased("gw0"), SLICE)
        assert (await spent(client))[1] == 0


async def test_a_gateway_that_leaves_holds_nothing(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        await warm(one)
        await placed(one, costly("runs", MUCH))
        one.reservations.forget_all()
        await one.leave()
        assert await spent(client) == (80, 0)


async def test_a_grant_that_is_heard_after_a_later_statement_gives_no_room(redis_server: RedisServer) -> None:
    async with two_gateways(redis_server) as (one, _):
        await warm(one)
        sums = one.reservations.spent
        for number in range(8):
            await placed(one, costly(f"r{number}", MUCH))
        [(_, heard)] = sums.take_slices(all_changed=True)
        assert (await placed(one, costly("meanwhile", MUCH))).spent, "until the store has answered"
        for number in range(8):
            await placed(one, costly(f"s{number}", MUCH))
        sums.take_all()
        assert heard is not None
        heard([sums._life.encode(), b"slice " + NAME.encode(), b"1"])
        assert not any(sums._sums[NAME].slice.room)


class Walk:
    """Three gateways spend a budget, and random things happen."""

    def __init__(self, seed: int, pools: list[Pool], client: redis.Redis, limit: int) -> None:
        self.dice, self.pools, self.client, self.within = random.Random(seed), pools, client, budget(limit)
        self.in_flight: dict[str, Pool] = {}
        self.cost = self.count = 0
        self.refused = self.covered = self.most_left = 0
        self.fault = self.pause if seed % 2 else self.lose_hash
        """One of them: a hash that is lost when a gateway has just come back gets what others had seen before."""

    async def place(self) -> None:
        pool = self.dice.choice(self.pools)
        for _ in range(self.dice.randint(1, 12)):
            self.count += 1
            try:
                placement = await pool.place(costly(f"id{self.count}", self.within))
            except OverBudget:
                self.refused += 1
                left = self.within.limit - self.cost - COST * len(self.in_flight)
                self.most_left = max(self.most_left, left // COST)
                continue
            assert isinstance(placement, Placement)
            pool.first_token(f"id{self.count}")
            self.in_flight[f"id{self.count}"] = pool
            self.covered += not placement.spent

    async def end(self) -> None:
        for name in self.dice.sample(sorted(self.in_flight), min(8, len(self.in_flight))):
            cost = self.dice.randint(0, COST)
            self.in_flight.pop(name).done(name, took(cost))
            self.cost += cost

    async def beat(self) -> None:
        await beaten(self.dice.choice(self.pools))

    async def state_slices(self) -> None:
        self.dice.choice(self.pools).reservations.count_adopted()

    async def pause(self) -> None:
        """A gateway is paused, reaped, and goes on."""
        paused, witness = self.dice.sample(self.pools, 2)
        paused.reservations.count_adopted()  # now, and not when `dies` has read what it writes
        await drained(paused)
        await dies(self.client, paused, witness, 5)  # so all in flight may have cost the most
        await self.check()
        await beaten(paused)

    async def reconnect(self) -> None:
        pool = self.dice.choice(self.pools)
        wire = pool.link.wire
        assert wire is not None
        pool.detach()
        pool.attach(wire)

    async def lose_hash(self) -> None:
        await self.client.delete(KEYS.spending)
        for pool in self.pools:
            pool.reassert()
            await beaten(pool)

    async def step(self) -> str:
        steps = [self.place] * 6 + [self.end] * 4 + [self.beat] * 4 + [self.state_slices] * 2
        steps += [self.reconnect, self.fault]
        step = self.dice.choice(steps)
        await step()
        await drained(*self.pools)
        return step.__name__

    async def check(self) -> None:
        settled, held = await spent(self.client)
        truth = self.cost + COST * len(self.in_flight)
        assert settled + held >= truth, "somebody could spend this again"
        assert truth <= self.within.limit


SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))]
"""With the first two, each fault happens."""


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_what_is_settled_and_held_is_what_was_spent_and_can_be(
    redis_server: RedisServer, client: redis.Redis, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.pool.pool.LEASE_MS", 3_600_000)  # only `dies` ends one
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(joined(redis_server.url, f"gw{n}")) for n in range(3)]
        await register(pools[0], 3)
        await asyncio.gather(*map(beaten, pools))
        walk, taken = Walk(seed, pools, client, 1000 * COST), Counter[str]()
        while walk.refused < 10:
            taken[await walk.step()] += 1
            await walk.check()
        assert len(taken) == 6
        assert walk.most_left < 20, "of 1000"
        assert walk.covered > 100
        for name, pool in walk.in_flight.items():
            pool.done(name, took(1))
        await refreshed(*pools)
        await refreshed(*pools)
        await refreshed(*pools)
        assert await spent(client) == (walk.cost + len(walk.in_flight), 0)
