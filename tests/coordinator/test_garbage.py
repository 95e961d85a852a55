"""Garbage in any key: placements, chores and agents go on, and all sums become right again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio as redis
from structlog.testing import capture_logs

from coordinator import breaker
from coordinator.agent.agent_store import AgentStore
from coordinator.agent.engine_session import Handover
from coordinator.chores import repair
from coordinator.chores.repair import CHECK_FLIGHT_EVERY_MS
from coordinator.chores.worker import Worker
from coordinator.errors import StoreError
from coordinator.pool.engine_feedback import credit, is_unchanged, tell_measured
from coordinator.pool.object_owners import find, remember
from coordinator.pool.owners import read_owners
from coordinator.pool.placed_chains import read_chains
from coordinator.pool.pool import Pool, Reservation
from coordinator.scripts import Placement, PolicyKnobs, Standing, TenantLimits
from coordinator.subset import Subset
from tests.cluster.ledger import Ledger
from tests.coordinator.stage import KEYS, chain, drained, place, register, replica, request
from tests.coordinator.stream import attend, gains, linked, say_all
from tests.redis_server import RedisServer

VALUES = (
    *("", " ", "x", "nan", "inf", "-inf", "-5", "1e3", "1.5", "9" * 16, "9" * 40, "0" * 400, "ready", "\x00", "é"),
    *(b"\xff\xfe", "1 2", "life1", "life1 claim", "life1 ready 5", "- " * 40, '{"a":', "[" * 5000, "{}"),
    *("1" * 100_000, "1" * 100_000 + "x"),
    *("life1 ready nan nan nan x", "r0 life1 nan nan -", "r0 life1 1 -5 -", "agent0 life1 nan session 0 0 x"),
    *("life1 resident gpu nan 0 nan 1 1 1", "life1 claim gpu -1 x 1 1", "0-1 x", "99999999999999999999-1 5"),
)
PROMPT = chain("garbage", 1, 2, 3)
LIMITS = TenantLimits(concurrency=10**15, tokens_per_min=10**12)  # nothing that can be read is as much
DIGEST = Subset.of(["r0", "r1"]).digest
QUEUE = (f"turns:0 {DIGEST}", f"line:0 {DIGEST} -", "grants:gw0", "heard:gw0")
HASHES = {
    **dict.fromkeys(("replicas", "breakers", "active", "backlog_tokens", "owned_tokens", "agents", "engines"), "r0"),
    **dict.fromkeys(("asks", "reports", "entries", "cursors", "tiers", "unreadable", "forgotten", "draining"), "r0"),
    "view": "?",
    "gateways": "gw0",
    "leases": "worker",
    "flight:gw0": "a",
    "bound:0": "@",
    "bound:1": PROMPT[-1],
    **dict.fromkeys(("rates", "speeds"), "r0"),
    **dict.fromkeys(("waiting", "waiting_tokens"), f"0 {DIGEST}"),
    "holds": "gw0",
    "seats:gw0": "seat",
    "fair": "0 -",
    "charges:gw0": "a",
    "budgets:gw0": "a",
    "tenants": "active t",
    "paces": DIGEST,
    "patient": PROMPT[0],
    f"own:{PROMPT[0]}": "r0",
    f"own:{PROMPT[-1]}": "r0",
}
"""Every hash, with a field that scripts read."""
OTHERS = ("turn", "held:r0", "measured:r0", "events:r0", "view_changes", *QUEUE)


def key_of(name: str) -> str:
    return KEYS.tenants if name == "tenants" else KEYS.anchor.removesuffix("-") + name


def marks_of(value: Any) -> Any:
    """For each key alone, only a few values run by default. All values run in the test that fills all keys at once."""
    return () if value in ("", "nan", b"\xff\xfe", "life1 claim", "9" * 40) else pytest.mark.slow


def name_of(value: Any) -> str:
    return repr(value)[:24]


@dataclass
class Cluster:
    """One pool with two replicas. An agent follows r0. Each replica has one request in
    flight."""

    pool: Pool
    chores: Worker
    link: AgentStore
    client: redis.Redis
    requests: int = 0

    async def live(self) -> None:
        """Runs every action of gateways and agents once, and continues when the store refuses one."""
        for step in (self._serve, self._chores, self._agent, self._read):
            try:
                await step()
            except StoreError:
                continue

    async def _serve(self) -> None:
        self.requests += 1
        name = f"q{self.requests}"
        for policy in ("prefix_kv_aware", "round_robin"):
            knobs = PolicyKnobs(policy, max_active_requests=50)
            asked = request(f"{name}{policy}", PROMPT, knobs=knobs, release=f"{name}x", seed=8, room_share=1.0)
            asked.standing, asked.limits = Standing(tenant="t"), LIMITS
            self.pool.adopt(Reservation(f"{name}x", "r1", "life1", 10, "-", asked.budget(10)))
            self.pool.count_adopted()
            try:
                placed = await self.pool.place(asked)
            finally:
                self.pool.done(f"{name}x")
                await drained(self.pool)
            if placed is not None:
                await self._answer(asked, placed)
        self.pool.reassert()
        await drained(self.pool)

    async def _answer(self, asked: Any, placed: Placement) -> None:
        pool = self.pool
        pool.first_token(asked.reservation)
        pool.report(placed.replica, placed.incarnation, "failure")
        pool.report(placed.replica, placed.incarnation, "success")
        tell_measured(pool, asked, placed, 300)
        credit(pool, asked, placed, 200)
        pool.claims.confirm(asked, placed)
        pool.done(asked.reservation)
        pool.register(replica("r1"), only_if_absent=True)
        await pool.explain(asked)

    async def _chores(self) -> None:
        await self.chores.tick()

    async def _agent(self) -> None:
        answer = await attend(self.link, counters={"running": 1.0})
        await Handover.find(self.link, answer, may_wait=False)
        await self.link.bindings([PROMPT[-1]], elsewhere_is_report=False)
        await self.link.publish(gains(PROMPT), 0.0, 5)

    async def _read(self) -> None:
        await read_owners(self.pool, PROMPT)
        await read_chains(self.pool.read, self.pool.keys, PROMPT)
        await is_unchanged(self.pool, "r0", PROMPT[0], "1")
        await find(self.pool, "resp", None)


@pytest.fixture
async def cluster(
    pool: Pool, client: redis.Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(breaker, "FAILURES", 100)
    await register(pool, 2)
    async with linked(redis_server.url) as link:
        cluster = Cluster(pool, Worker(pool), link, client)
        await attend(link, counters={"running": 1.0})
        await place(pool, "a", PROMPT, pinned="r0")
        await place(pool, "b", PROMPT, pinned="r1")
        await remember(pool, "resp", "r0", "life1", None)
        await say_all(link, gains(PROMPT), 5)
        await cluster.live()
        yield cluster


async def mended(cluster: Cluster) -> None:
    """Runs the cluster until all damage is repaired: the store places requests, r0 is exact, and all sums are right."""
    for _ in range(6):
        await cluster.live()
        cluster.chores._repair._recounts.clear()  # makes the second sum now, instead of 2 s later
    placed = await place(cluster.pool, "after", PROMPT)
    assert placed.why == "hit"
    cluster.pool.done("after")
    await drained(cluster.pool)
    ledger = Ledger(cluster.client, "m")
    assert (await ledger.sums()).problems() == []
    assert await ledger.ownership_problems() == []
    assert set(await ledger.replicas()) == {"r0", "r1"}
    fleet = await cluster.pool.beat()
    assert fleet.is_exact("r0")
    number = await cluster.link.publish(gains(PROMPT), 0.0, 5)
    assert await cluster.link.is_applied(number)
    assert (await ledger.sums()).counted == {"r0": 1, "r1": 1}, "the requests in flight"


@pytest.mark.parametrize("value", [pytest.param(value, marks=marks_of(value)) for value in VALUES], ids=name_of)
@pytest.mark.parametrize("key", HASHES)
async def test_garbage_in_any_field_is_survived_and_mended(cluster: Cluster, key: str, value: Any) -> None:
    await cluster.client.hset(key_of(key), HASHES[key], value)
    await mended(cluster)


async def test_fields_whose_names_cannot_be_read_go(cluster: Cluster) -> None:
    names = dict.fromkeys(("gateways", "replicas", "breakers", "active", "owned_tokens"), b"\xff\xfe")
    for key, name in names.items():
        await cluster.client.hset(key_of(key), name, "1 1")
    await mended(cluster)
    for key, name in names.items():
        assert not await cluster.client.hexists(key_of(key), name), key


@pytest.mark.parametrize("key", [*HASHES, *OTHERS])
async def test_a_key_of_another_type_is_survived_and_mended(cluster: Cluster, key: str) -> None:
    await cluster.client.delete(key_of(key))
    if key == "turn":
        await cluster.client.rpush(key_of(key), "x")
    else:
        await cluster.client.set(key_of(key), "x")
    await mended(cluster)


PLACES_READ = [key for key in HASHES if key not in ("replicas", "gateways")]


async def placed_whole(cluster: Cluster) -> None:
    """A placement is right at once, before any repair: the store places it and writes its complete records."""
    new = chain("new", 1, 2)
    for policy in ("prefix_kv_aware", "round_robin"):
        for keys in (PROMPT, new):
            asked = request(f"{policy}{keys[-1]}", keys, knobs=PolicyKnobs(policy))
            placed = await cluster.pool.place(asked)
            assert placed is not None
            entry = await cluster.client.hget(KEYS.flight("gw0"), asked.reservation)
            assert entry.split(" ")[:2] == [placed.replica, "life1"]
            assert await cluster.client.hget(KEYS.own(keys[-1]), placed.replica)
            cluster.pool.done(asked.reservation)
            await drained(cluster.pool)
            assert not await cluster.client.hexists(KEYS.flight("gw0"), asked.reservation)


@pytest.mark.parametrize("value", ["", "nan", b"\xff\xfe"], ids=name_of)
@pytest.mark.parametrize("key", PLACES_READ)
async def test_a_placement_beside_garbage_is_whole_at_once(cluster: Cluster, key: str, value: Any) -> None:
    await cluster.client.hset(key_of(key), HASHES[key], value)
    await placed_whole(cluster)
    await mended(cluster)


@pytest.mark.parametrize("key", [*PLACES_READ, "turn"])
async def test_a_placement_beside_a_key_of_another_type_is_whole_at_once(cluster: Cluster, key: str) -> None:
    await cluster.client.delete(key_of(key))
    await cluster.client.rpush(key_of(key), "x")
    await placed_whole(cluster)
    await mended(cluster)


@pytest.mark.parametrize("value", VALUES, ids=name_of)
async def test_garbage_everywhere_at_once_is_survived_and_mended(cluster: Cluster, value: Any) -> None:
    for key, field in HASHES.items():
        await cluster.client.hset(key_of(key), field, value)
    await mended(cluster)


@pytest.mark.parametrize("value", VALUES, ids=name_of)
async def test_garbage_in_what_is_no_hash_is_survived_and_mended(cluster: Cluster, value: Any) -> None:
    client = cluster.client
    await client.set(KEYS.turn, value)
    await client.zadd(KEYS.held("r0"), {value: 5, b"k\xff": float("inf"), "ab": float("-inf")})
    await client.rpush(KEYS.measured("r0"), value)
    await client.expire(KEYS.measured("r0"), 60)
    await client.xadd(KEYS.events("r0"), {"n": value, "inc": "life1", "at_ms": "1", "transitions": "reset"})
    await client.xadd(KEYS.events("r0"), {"n": "9", "inc": value, "at_ms": value, "transitions": value})
    for key in PROMPT:
        await client.set(KEYS.chunk(key), value, ex=60)
    await client.set(KEYS.response("resp"), value, ex=60)
    await client.hset(KEYS.tiers, "r0", "nan ?")
    await client.hset(KEYS.active, value, value)
    await mended(cluster)


async def test_in_a_large_pool_garbage_is_mended_piece_by_piece(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_CHECKED_AT_ONCE", 1)
    for key, field in HASHES.items():
        await cluster.client.hset(key_of(key), field, "nan")
    for key in ("active", "cursors"):
        await cluster.client.hset(key_of(key), mapping={f"x{number}": "nan" for number in range(20)})
    for _ in range(40):
        await cluster.chores.tick()
    await mended(cluster)
    for key in ("active", "cursors"):
        assert await cluster.client.hlen(key_of(key)) <= 2


async def test_sums_that_can_be_read_and_are_wrong_are_right_within_a_minute(cluster: Cluster) -> None:
    await cluster.client.hset(KEYS.active, "r0", 7)
    await cluster.client.hset(KEYS.backlog_tokens, "r1", 10**9)
    cluster.chores._repair._flight_checked_ms -= CHECK_FLIGHT_EVERY_MS
    await mended(cluster)


async def test_owned_tokens_that_change_while_they_are_summed_are_right(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A withdrawal follows each of the first five pieces of the sum, which may have passed the key or not."""
    monkeypatch.setattr(repair, "_PIECE", 2)
    pool, run, changes = cluster.pool, cluster.pool.run, 5
    await place(pool, "more", chain("more", *range(9)), pinned="r1")
    pool.done("more")
    await drained(pool)

    def changing(name: str, **arguments: Any) -> Any:
        nonlocal changes
        reply = run(name, **arguments)
        if name == "recount" and changes:
            changes -= 1
            lost = chain("more", *range(9))[changes]
            pool.tell("withdraw", replica="r1", reservation="more", keys=[lost])
        return reply

    monkeypatch.setattr(pool, "run", changing)
    await cluster.client.hset(KEYS.owned_tokens, "r1", "x")
    await cluster.chores.tick()
    assert changes == 0
    await drained(pool)
    assert await Ledger(cluster.client, "m").ownership_problems() == []


async def test_an_owned_sum_that_is_right_by_chance_is_not_taken_for_right(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum lacks a key that was claimed after the keys were listed. A key of that size comes when it is compared."""
    monkeypatch.setattr(repair, "AGAIN_MS", 0)
    pool, run, late = cluster.pool, cluster.pool.run, ["second", "first"]

    async def claiming(name: str, **arguments: Any) -> Any:
        is_first_piece = name == "recount" and arguments["sum_so_far"] in ("", "?") and arguments["replica"] == "r1"
        if is_first_piece and late:
            new = late.pop()
            await place(pool, new, chain(new, 1), pinned="r1")
        return await run(name, **arguments)

    monkeypatch.setattr(pool, "run", claiming)
    await cluster.client.hset(KEYS.owned_tokens, "r1", "x")
    for _ in range(6):
        await cluster.chores.tick()
        await drained(pool)
    assert not late
    assert await Ledger(cluster.client, "m").ownership_problems() == []


async def test_an_owned_sum_that_never_stands_still_is_made_right_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "AGAIN_MS", 0)
    pool, run, read, late, claims = cluster.pool, cluster.pool.run, cluster.pool.read, ["late"], 0

    async def claim_late(name: str, **arguments: Any) -> Any:
        if name == "recount" and arguments["sum_so_far"] == "" and late:
            await place(pool, "late", chain(late.pop(), 1, 2), pinned="r1")
        return await run(name, **arguments)

    async def claiming(*command: Any) -> Any:
        nonlocal claims
        if command[0] == "HGET" and command[1] == KEYS.owned_tokens and claims < 20:
            claims += 1
            await place(pool, f"one {claims}", chain(f"one {claims}", 1), pinned="r1")
        return await read(*command)

    monkeypatch.setattr(pool, "run", claim_late)
    monkeypatch.setattr(pool, "read", claiming)
    await cluster.client.hset(KEYS.owned_tokens, "r1", "x")
    for _ in range(30):
        await cluster.chores.tick()
        await drained(pool)
        if claims >= 8 and not await Ledger(cluster.client, "m").ownership_problems():
            break
    assert (late, claims < 20) == ([], True)


async def test_what_could_not_be_read_is_counted_and_named_once_without_its_value(cluster: Cluster) -> None:
    with capture_logs() as logs:
        for _ in range(2):
            await cluster.client.hset(KEYS.active, "r1", "secret")
            await cluster.live()
    assert cluster.pool.unreadable == {"active": 2}
    told = [log for log in logs if log["event"] == "could not be read"]
    assert [(log["key"], log["field"]) for log in told] == [("active", "r1")]
    assert "secret" not in str(logs)
    assert (await cluster.client.hget(KEYS.unreadable, "active")).split(" ")[::2] == ["2", "r1"]
