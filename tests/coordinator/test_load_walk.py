"""A long random walk over all operations that change load or ownership. The test checks the sums after every step."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest
import redis.asyncio as redis

from coordinator.placement import Placement, PlaceRequest, Reservation
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    beaten,
    chain,
    drained,
    drop,
    hash_of,
    joined,
    keys_of,
    now_ms,
    replica,
    request,
)
from tests.redis_server import RedisServer

GATEWAYS = ("gw0", "gw1", "gw2")
REPLICAS = ("r0", "r1", "r2", "r3")
STEPS = 150


class Walk:
    """Three gateways, four replicas, and random steps."""

    def __init__(self, seed: int, pools: list[Pool], client: redis.Redis) -> None:
        self.dice = random.Random(seed)
        self.pools = pools
        self.client = client
        self.lives = dict.fromkeys(REPLICAS, 1)
        self.placed: list[tuple[Pool, PlaceRequest, Placement]] = []
        self.count = 0

    async def place(self) -> None:
        pool, dice = self.dice.choice(self.pools), self.dice
        self.count += 1
        keys = chain(*(dice.randint(0, 1) for _ in range(dice.randint(0, 7))))
        asked = request(
            f"id{self.count}",
            keys,
            seed=dice.getrandbits(31),
            tried=tuple(dice.sample(REPLICAS, dice.randint(0, 2))),
            release=dice.choice(["", *pool.live]),
            pinned=dice.choice(["", "", "", dice.choice(REPLICAS)]),
            knobs=PolicyKnobs(dice.choice(["prefix_kv_aware", "random", "least_loaded"])),
        )
        placement = await pool.place(asked)
        if placement is not None:
            self.placed.append((pool, asked, placement))

    async def first_token(self) -> None:
        pool = self.dice.choice(self.pools)
        for one in self.dice.sample(sorted(pool.live), min(2, len(pool.live))):
            pool.first_token(one)

    async def done(self) -> None:
        pool = self.dice.choice(self.pools)
        for one in self.dice.sample(sorted(pool.live), min(2, len(pool.live))):
            pool.done(one)
            pool.done(one)

    async def reassert(self) -> None:
        pool = self.dice.choice(self.pools)
        if self.dice.random() < 0.5 and pool.live:
            del pool.live[self.dice.choice(sorted(pool.live))]
        pool.reassert()

    async def adopt(self) -> None:
        pool, name = self.dice.choice(self.pools), self.dice.choice(REPLICAS)
        self.count += 1
        life = self.lives[name] - self.dice.choice([0, 0, 0, 1])
        reused = self.dice.choice([f"id{self.count}", *pool.live])
        pool.adopt(Reservation(reused, name, f"life{life}", self.dice.randint(0, 500), chain(1)[0]))
        if reused != f"id{self.count}" or self.dice.random() < 0.5:
            pool.reservations.count_adopted()

    async def restart_replica(self) -> None:
        name = self.dice.choice(REPLICAS)
        self.lives[name] += 1
        self.dice.choice(self.pools).register(replica(name, f"life{self.lives[name]}"))

    async def change_state(self) -> None:
        name = self.dice.choice(REPLICAS)
        state = self.dice.choice(["ready", "dead"])
        self.dice.choice(self.pools).register(replica(name, f"life{self.lives[name]}", state))

    async def lose_gateway(self) -> None:
        """A gateway's lease ends. Another gateway reaps it completely, or dies in the middle. Then the first gateway
        turns out to be alive, sometimes without its requests."""
        lost, witness = self.dice.sample(self.pools, 2)
        epoch = (await hash_of(self.client, KEYS.gateways))[lost.gateway].split(" ")[0]
        await self.client.hset(KEYS.gateways, lost.gateway, f"{epoch} {await now_ms(self.client) - 1}")
        if self.dice.random() < 0.5:
            lost.live.clear()
        if self.dice.random() < 0.5:
            await witness.run("reap", gateway=lost.gateway, at_most=1, silent_ms=0)
        else:
            await beaten(witness)
        await lost.beat()

    async def beat(self) -> None:
        await self.dice.choice(self.pools).beat()

    async def withdraw(self) -> None:
        if self.placed:
            pool, asked, placement = self.dice.choice(self.placed)
            pool.claims.withdraw(asked, placement)

    async def drop(self) -> None:
        name = self.dice.choice(REPLICAS)
        held = await self.client.zrange(KEYS.held(name), 0, -1)
        some = self.dice.sample(held, min(3, len(held)))
        await drop(self.dice.choice(self.pools), self.client, name, some)

    async def step(self) -> str:
        steps = [self.place] * 10 + [self.first_token, self.done, self.done] * 2
        steps += [self.reassert, self.adopt, self.restart_replica, self.change_state, self.lose_gateway]
        steps += [self.beat, self.withdraw, self.drop]
        step = self.dice.choice(steps)
        await step()
        await drained(*self.pools)
        return step.__name__

    async def check_books(self) -> None:
        records = {name: text.split(" ") for name, text in (await hash_of(self.client, KEYS.replicas)).items()}
        active, backlog, owned = Counter[str](), Counter[str](), Counter[str]()
        for gateway in GATEWAYS:
            for entry in (await hash_of(self.client, KEYS.flight(gateway))).values():
                name, incarnation, _, tokens, _ = entry.split(" ")
                if records[name][0] == incarnation:
                    active[name] += 1
                    backlog[name] += int(tokens)
        for key in await keys_of(self.client, KEYS.own("*")):
            for name, text in (await hash_of(self.client, key)).items():
                incarnation, _, _, span, *_ = text.split(" ")
                if records[name][0] == incarnation:
                    owned[name] += int(span)
        for key, expected in ((KEYS.active, active), (KEYS.backlog_tokens, backlog), (KEYS.owned_tokens, owned)):
            book = {name: int(value) for name, value in (await hash_of(self.client, key)).items()}
            assert min(book.values(), default=0) >= 0
            assert {name: value for name, value in book.items() if value} == dict(+expected), key

    async def check_live(self) -> None:
        """The requests that a gateway has in flight on a current incarnation are in its records in Redis."""
        records = {name: text.split(" ") for name, text in (await hash_of(self.client, KEYS.replicas)).items()}
        for pool in self.pools:
            standing = set(await hash_of(self.client, KEYS.flight(pool.gateway)))
            current = {one.id for one in pool.live.values() if records[one.replica][0] == one.incarnation}
            assert current - pool.settlements.to_adopt <= standing


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_sums_equal_the_flights_and_the_records_after_every_step(
    redis_server: RedisServer, client: redis.Redis, seed: int
) -> None:
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(joined(redis_server.url, gateway)) for gateway in GATEWAYS]
        walk = Walk(seed, pools, client)
        for name in REPLICAS:
            await pools[0].register(replica(name))
        taken: list[str] = []
        for _ in range(STEPS):
            taken.append(await walk.step())
            await walk.check_books()
            await walk.check_live()
        assert len(set(taken)) == 11
        for pool in pools:
            for one in list(pool.live):
                pool.done(one)
            await pool.beat()
        await drained(*pools)
        assert set((await hash_of(client, KEYS.active)).values()) == {"0"}
        assert set((await hash_of(client, KEYS.backlog_tokens)).values()) == {"0"}
