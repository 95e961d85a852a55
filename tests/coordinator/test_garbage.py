"""Garbage in any key: requests, maintenance and agents go on, what was found is named, and the map and all sums are
right again."""

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
from coordinator.errors import StoreError
from coordinator.maintenance import repair
from coordinator.maintenance.repair import FULL_EVERY_MS
from coordinator.maintenance.worker import Worker
from coordinator.placement import Placement, Reservation, Standing
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.engine_feedback import is_unchanged, tell_measured
from coordinator.pool.object_owners import find, remember
from coordinator.pool.owners import read_owners
from coordinator.pool.placed_chains import read_chains
from coordinator.pool.pool import Pool
from coordinator.subset import Subset
from tests.account_limits import limits_of
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
LIMITS = limits_of(concurrency=10**15, tokens_per_min=10**12)  # nothing that can be read is as much
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
TYPE = "a key of another type"
KEPT = ("flight:gw0", "budgets:gw0", "draining")
"""What no repair changes."""


def key_of(name: str) -> str:
    return KEYS.tenants if name == "tenants" else KEYS.anchor.removesuffix("-") + name


def name_of(value: Any) -> str:
    return repr(value)[:24]


@dataclass
class Cluster:
    """One pool with two replicas. An agent follows r0. Each replica has one request in flight."""

    pool: Pool
    maintenance: Worker
    link: AgentStore
    client: redis.Redis
    requests: int = 0

    async def live(self) -> None:
        """Runs every action of gateways and agents once, and continues when the store refuses one."""
        for step in (self._serve, self._maintain, self._agent, self._read):
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
            self.pool.reservations.count_adopted()
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
        pool.claims.confirm(asked, placed)
        pool.done(asked.reservation)
        pool.register(replica("r1"), only_if_absent=True)
        await pool.explain(asked)

    async def _maintain(self) -> None:
        await self.maintenance.tick()

    async def _agent(self) -> None:
        """Like an agent, it says everything again if it is asked to, or if the stream has gone on without it."""
        known, self.link.entries = self.link.entries, None
        answer = await attend(self.link, counters={"running": 1.0})
        await Handover.find(self.link, answer)
        await self.link.bindings([PROMPT[-1]], elsewhere_is_report=False)
        if answer.asked == "restate" or known != self.link.entries:
            await say_all(self.link, gains(PROMPT), 5)
        await self.link.publish(gains(PROMPT), 0.0, 5)

    async def _read(self) -> None:
        await read_owners(self.pool, PROMPT)
        await read_chains(self.pool.read, self.pool.keys, PROMPT)
        await is_unchanged(self.pool, "r0", PROMPT[0], "1")
        await find(self.pool, "resp", None)

    async def damage(self, key: str, value: Any) -> None:
        """Writes the value into the key's field, or replaces the key by one of another type."""
        if value != TYPE:
            await self.client.hset(key_of(key), HASHES[key], value)
            return
        await self.client.delete(key_of(key))
        if key == "turn":
            await self.client.rpush(key_of(key), "x")
        else:
            await self.client.set(key_of(key), "x")

    async def found(self) -> dict[str, str]:
        """The kinds of records that could not be read, and the field of the last of each."""
        told = await self.client.hgetall(KEYS.unreadable)
        return {kind: text.split(" ")[2] for kind, text in told.items() if kind[0] != "?" and " " not in kind}

    async def is_placing(self) -> None:
        """A placement is right at once, before any repair: the store places it and writes its complete records."""
        for policy in ("prefix_kv_aware", "round_robin"):
            for keys in (PROMPT, chain("new", 1, 2)):
                asked = request(f"{policy}{keys[-1]}", keys, knobs=PolicyKnobs(policy))
                placed = await self.pool.place(asked)
                assert placed is not None
                entry = await self.client.hget(KEYS.flight("gw0"), asked.reservation)
                assert entry.split(" ")[:2] == [placed.replica, "life1"]
                assert await self.client.hget(KEYS.own(keys[-1]), placed.replica)
                self.pool.done(asked.reservation)
                await drained(self.pool)
                assert not await self.client.hexists(KEYS.flight("gw0"), asked.reservation)

    async def is_right_again(self) -> None:
        """Some heartbeats later the store places requests, r0 is exact, and all sums are right."""
        for _ in range(6):
            await self.live()
        placed = await place(self.pool, "after", PROMPT)
        assert placed.why == "hit"
        self.pool.done("after")
        await drained(self.pool)
        ledger = Ledger(self.client, "m")
        sums = await ledger.sums()
        assert sums.problems() == []
        assert sums.counted == {"r0": 1, "r1": 1}, "the requests in flight"
        assert await ledger.ownership_problems() == []
        assert set(await ledger.replicas()) == {"r0", "r1"}
        assert (await self.pool.beat()).is_exact("r0")
        await self.link.publish(gains(PROMPT), 0.0, 5)


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


CASES = [
    *((key, value) for key in HASHES for value in ("nan", b"\xff\xfe")),
    *((key, TYPE) for key in (*HASHES, *OTHERS)),
]


@pytest.mark.parametrize(("key", "value"), CASES, ids=name_of)
async def test_garbage_in_any_key_stops_nothing_and_all_is_right_again(cluster: Cluster, key: str, value: Any) -> None:
    await cluster.damage(key, value)
    if key not in ("replicas", "gateways"):
        await cluster.is_placing()
    await cluster.is_right_again()


@pytest.mark.parametrize("value", VALUES, ids=name_of)
async def test_garbage_everywhere_at_once_stops_nothing(
    cluster: Cluster, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "VOIDED_EVERY_MS", 0)  # it is found one after the other
    client = cluster.client
    for key in HASHES:
        await cluster.damage(key, value)
    await client.set(KEYS.turn, value)
    await client.zadd(KEYS.held("r0"), {value: 5, b"k\xff": float("inf"), "ab": float("-inf")})
    await client.rpush(KEYS.measured("r0"), value)
    await client.xadd(KEYS.events("r0"), {"n": value, "inc": "life1", "at_ms": "1", "transitions": "reset"})
    await client.xadd(KEYS.events("r0"), {"n": "9", "inc": value, "at_ms": value, "transitions": value})
    for key in PROMPT:
        await client.set(KEYS.chunk(key), value, ex=60)
    await client.set(KEYS.response("resp"), value, ex=60)
    for key in ("gateways", "replicas", "breakers", "active", "owned_tokens"):
        await client.hset(key_of(key), mapping={b"\xff\xfe": "1 1"})
    await client.hset(KEYS.active, value, value)
    await cluster.is_right_again()
    assert not await client.hexists(KEYS.active, b"\xff\xfe")


async def test_in_a_large_pool_garbage_is_found_piece_by_piece(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_CHECKED_AT_ONCE", 1)
    monkeypatch.setattr(repair, "VOIDED_EVERY_MS", 0)
    for key in HASHES:
        await cluster.damage(key, "nan")
    for key in ("active", "cursors"):
        await cluster.client.hset(key_of(key), mapping={f"x{number}": "nan" for number in range(20)})
    for _ in range(40):
        await cluster.maintenance.tick()
    await cluster.is_right_again()
    for key in ("active", "cursors"):
        assert await cluster.client.hlen(key_of(key)) <= 2


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


async def test_every_kind_of_record_is_named_and_what_is_nowhere_else_stays(cluster: Cluster) -> None:
    """What nobody may drop is looked for once a minute. What a placement has dropped, it has told."""
    looked_for = HASHES.keys() - {"view", "bound:1", "seats:gw0", "charges:gw0", "unreadable"}
    await cluster.damage(f"own:{PROMPT[-1]}", "life1 garbage")
    await place(cluster.pool, "c", PROMPT)
    await cluster.maintenance._repair.repair_all()
    for key in looked_for:
        await cluster.client.hset(key_of(key), "x" if key in KEPT else HASHES[key], "\x00")
    cluster.maintenance._repair._full_ms -= FULL_EVERY_MS
    await cluster.maintenance._repair.repair_all()
    assert (await cluster.found()).keys() == {key.partition(":")[0] for key in looked_for}
    for key in KEPT:
        assert await cluster.client.hget(key_of(key), "x") == "\x00", key


async def test_sums_that_can_be_read_and_are_wrong_are_right_within_a_minute(cluster: Cluster) -> None:
    await cluster.client.hset(KEYS.active, "r0", 7)
    await cluster.client.hset(KEYS.backlog_tokens, "r1", 10**9)
    cluster.maintenance._repair._full_ms -= FULL_EVERY_MS
    await cluster.is_right_again()


LATER = {
    "replicas": "life1 resting 5 1 0 http://r9 more",
    "gateways": "0 0 more",
    "breakers": "1 0 0 more",
    "agents": "agent9 life1 1 telepathy 0 0 -1 more",
    "engines": '{"more": []}',
    "asks": "dance 5",
    "reports": "5 more",
    "cursors": "1-1 5 more",
    "tiers": "0.5 0.5 more",
    "forgotten": "5 more",
    "draining": "life1 5 more 6",
    "rates": "5 more",
    "speeds": "5 more",
    "holds": "1 2 more",
    "paces": "1 0.5 1 more",
    "leases": "any thing",
    "tenants": "any thing",
    "fair": "5.5",
    "flight:gw0": "r0 life0 1 5 - more",
    "budgets:gw0": "t 1 1 0 more",
    "bound:0": "any thing",
}
"""For each kind, a record as a later version may write it."""


async def test_records_of_a_later_version_are_no_garbage(cluster: Cluster) -> None:
    for key, record in LATER.items():
        await cluster.client.hset(key_of(key), "kind of-a-later-version" if key == "tenants" else "later", record)
    entry = await cluster.client.hget(KEYS.flight("gw0"), "b")
    await cluster.client.hset(KEYS.flight("gw0"), "b", f"{entry} more")
    await cluster.client.hset(KEYS.own(PROMPT[0]), "r0", "life1 certain gpu 100 0 9999999999999 5 6 7 more")
    owned = await cluster.client.hgetall(KEYS.own(PROMPT[0]))
    await cluster.client.hset(KEYS.owned_tokens, "r1", "garbage")
    cluster.maintenance._repair._full_ms -= FULL_EVERY_MS
    await cluster.maintenance._repair.repair_all()
    for key, record in LATER.items():
        assert record in (await cluster.client.hgetall(key_of(key))).values(), key
    assert (await cluster.client.hget(KEYS.flight("gw0"), "b")).endswith(" more"), "of a replica that was voided"
    await place(cluster.pool, "c", PROMPT)
    assert await cluster.client.hgetall(KEYS.own(PROMPT[0])) == owned
    assert await cluster.found() == {"owned_tokens": "r1"}


async def garbage_in_own(cluster: Cluster, name: str) -> None:
    await cluster.client.hset(KEYS.own(PROMPT[0]), name, "garbage")
    await cluster.pool.run("withdraw", replica=name, reservation="", keys=[PROMPT[0]])


async def garbage_in_held(cluster: Cluster, name: str) -> None:
    await cluster.client.zadd(KEYS.held(name), {"no key": 1})
    await cluster.pool.run("withdraw", replica=name, reservation="", keys=["no key"])


async def garbage_in_owned_tokens(cluster: Cluster, name: str) -> None:
    await cluster.client.hset(KEYS.owned_tokens, name, "garbage")


@pytest.mark.parametrize("garbage", [garbage_in_own, garbage_in_held, garbage_in_owned_tokens])
async def test_a_voided_residency_is_said_again_or_trimmed_and_its_requests_still_count(
    cluster: Cluster, garbage: Any
) -> None:
    client, ledger = cluster.client, Ledger(cluster.client, "m")
    before = await ledger.replicas()
    for name in ("r0", "r1"):
        await garbage(cluster, name)
    await cluster.maintenance._repair.repair_all()
    now = await ledger.replicas()
    assert all(now[name].since_ms > before[name].since_ms for name in now)
    assert await client.hgetall(KEYS.owned_tokens) == {"r0": "0", "r1": "0"}
    assert await client.hgetall(KEYS.asks) == {"r0": "restate"}, "r1 has no agent"
    assert await client.hgetall(KEYS.active) == {"r0": "1", "r1": "1"}
    assert (await ledger.sums()).problems() == []
    await cluster._agent()
    assert await client.hget(KEYS.owned_tokens, "r0") == "400", "what the agent holds"
    await cluster.maintenance.tick()
    assert await client.zcard(KEYS.held("r1")) == 0
    await cluster.is_right_again()


async def test_a_residency_is_voided_once_a_minute_however_often_garbage_comes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, since_ms = cluster.client, set()
    for _ in range(5):
        await garbage_in_owned_tokens(cluster, "r0")
        await cluster.is_placing()
        await cluster.live()
        since_ms.add((await Ledger(client, "m").replicas())["r0"].since_ms)
    assert len(since_ms) == 1
    assert await client.hget(KEYS.owned_tokens, "r0") == "void"
    assert cluster.pool.unreadable == {"owned_tokens": 5}
    monkeypatch.setattr(repair, "VOIDED_EVERY_MS", 0)
    await cluster.is_right_again()


async def test_keys_that_are_lost_are_said_again_and_requests_that_are_lost_count_no_more(cluster: Cluster) -> None:
    for key in ("flight:gw0", "budgets:gw0"):
        await cluster.damage(key, TYPE)
    await cluster.maintenance._repair.repair_all()
    assert (await Ledger(cluster.client, "m").sums()).are_zero
    await cluster.damage("held:r0", TYPE)
    await cluster.maintenance._repair.repair_all()
    assert await cluster.client.hget(KEYS.asks, "r0") == "restate"
    await cluster.is_right_again()


async def test_what_was_said_before_the_numbers_of_entries_were_lost_is_not_believed_after_it(cluster: Cluster) -> None:
    """The agent does not say it again. Its number is larger than those of a stream that begins anew."""
    gone = chain("gone", 1)
    for _ in range(40):
        await cluster.link.publish(gains(gone), 0.0, 5)
    for key in (KEYS.entries, KEYS.cursors):
        await cluster.client.hset(key, "r0", "garbage")
    await cluster.is_right_again()
    assert (await place(cluster.pool, "d", gone)).why == "cold"
