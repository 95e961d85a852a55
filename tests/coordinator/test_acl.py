"""A Redis user with only the rights that coordination needs."""

from __future__ import annotations

import asyncio
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import redis.asyncio as redis
from redis.exceptions import NoPermissionError

import coordinator
from coordinator.decision_ring import LEAST_BYTES, DecisionRing
from coordinator.errors import StoreDown, StoreRefused
from coordinator.keys import (
    WATCHER,
    PoolKeys,
    audit_key,
    console_secret_key,
    decision_ring_key,
    decision_slot_key,
    decisions_key,
    models_key,
    prefix,
    records_key,
    usage_key,
)
from coordinator.known_pools import list_pool
from coordinator.maintenance.held_keys import forget
from coordinator.placement import Placement, Reservation, Used
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.account_spending import OldBudgets, read_spent
from coordinator.pool.engine_feedback import ask_reset, tell_measured
from coordinator.pool.hedged import FirstBytes
from coordinator.pool.hedged import tell as tell_of_first_bytes
from coordinator.pool.object_owners import find, remember
from coordinator.pool.pool import Pool
from coordinator.pool.progress import read_progress, write_progress
from coordinator.pool.routed import Split, Way, choose_way
from coordinator.records import AuditNote, RecordChange, RecordStore
from coordinator.spending import FREE, AccountBudget, Bill
from coordinator.store import Store, StoreOptions
from coordinator.survey import Survey
from coordinator.usage import Consumed, Hour, Row, UsageStore
from gateway.settings.policies import POLICIES
from tests.coordinator.stage import (
    chain,
    drained,
    joined,
    now_ms,
    place,
    register,
    replica,
    request,
    running,
    sweep,
    trim,
)
from tests.coordinator.stream import attend, gains, linked, say_all
from tests.coordinator.watch.stage import chunk, holds, watching
from tests.polling import eventually
from tests.redis_server import RedisServer

COMMANDS = (
    *("ping", "eval", "evalsha", "script|load", "script|exists", "time"),
    *("exists", "get", "mget", "strlen", "set", "del", "unlink", "incr", "expire"),
    *("hget", "hmget", "hgetall", "hkeys", "hset", "hdel", "hincrby", "hlen"),
    *("zadd", "zrem", "zcard", "zrange", "zrangebyscore"),
    *("zscore", "zmscore", "zcount", "zrevrange", "zrandmember", "hrandfield"),
    *("sadd", "smembers", "rpush", "lrange", "ltrim", "blmove", "xadd", "xread", "xrevrange"),
)
WATCHES = (
    *("+info", "+dbsize", "+randomkey", "+pttl", "+memory|usage", "+subscribe"),
    *("resetchannels", "&__keyevent@0__:set", "&__keyevent@0__:evicted"),
)
TENDS = ("~*@*@*@*", "+eval", "+evalsha", "+pttl", "+pexpire", "+memory|usage", "+object|idletime")
RULES = ("reset", "on", ">secret", "resetkeys", "~kvgate:*", "-@all", *(f"+{name}" for name in COMMANDS))
AGENT_KEYS = ("~kvgate:{*}:*", "~kvgate:pools", "~kvgate:tenants", "~kvgate:spending")
AGENT_RULES = (*RULES[:4], *AGENT_KEYS, *RULES[5:])


@pytest.fixture
async def restricted_url(redis_server: RedisServer, client: redis.Redis) -> str:
    await client.execute_command("ACL", "SETUSER", "kvgate", *RULES)
    return redis_server.url.replace("redis://", "redis://kvgate:secret@")


async def choose(store: Store) -> None:
    """The calls for a model with two backends: two requests of a conversation stay together."""
    chosen = set()
    for name in ("m1", "m2"):
        store.pool(name).register(replica(f"{name}-r"))
        await drained(store.pool(name))
    for turn in range(2):
        ways = [Way(store.pool(name).placer, request(f"{name}-{turn}", chain(turn)), name, 1) for name in ("m1", "m2")]
        chosen.add((await choose_way(ways, Split("", "chat", "c" * 32, True)))[0].backend)
    assert len(chosen) == 1


async def live_a_little(pool: Pool) -> None:
    """Every call that a gateway makes on its pool."""
    for name in ("r0", "r1"):
        pool.register(replica(name, capacity_tokens=250))
    await pool.read("HSET", pool.keys.tiers, "r0", "- 0.9")
    asked = request("a", chain(1, 2, 3))
    placed = await pool.place(asked)
    assert placed is not None
    pool.first_token("a")
    pool.report(placed.replica, placed.incarnation, "failure")
    pool.report(placed.replica, placed.incarnation, "success")
    for policy in ("round_robin", "random"):
        other = request(policy, chain(1, policy), knobs=type(asked.knobs)(policy), release="a")
        placed = await pool.place(other)
        assert placed is not None
        pool.claims.withdraw(other, placed)
    assert await pool.explain(asked)
    assert await tell_of_first_bytes(pool.run, 10**6, {"r0": FirstBytes(1, 1)}) == {"r0": False}
    beside = request("beside", chain(5), room_share=1.0, hedge=(0.5, 10**6))
    assert await pool.place(beside) is not None
    pool.done("beside")
    pool.adopt(Reservation("b", "r0", "life1", 10, "-"))
    pool.reservations.count_adopted()
    pool.reassert()
    pool.done("b")
    await remember(pool, "resp_1", "r0", "life1", None)
    assert await find(pool, "resp_1", None) == ("r0", "life1", True)
    await drained(pool)
    for _ in range(2):
        fleet = await pool.beat()
        for record in fleet.replicas.values():
            await trim(pool, record, fleet)
    await wait_for_room(pool)
    pool.change_state("r1", "life1", "ready", "hung")
    write_progress(pool, {"r0": 1})
    assert (await read_progress(pool, "r0"))[0] == f"{pool.gateway} 1".encode()
    pool.register(replica("r2", state="dead"))
    assert await forget(pool, (await pool.beat()).replicas["r2"])
    await pool.beat(leaving=True)


async def wait_for_room(pool: Pool) -> None:
    """A request waits until another one ends."""
    knobs = PolicyKnobs(max_active_requests=1)
    for name in list(pool.live):
        pool.done(name)
    for name in ("r0", "r1"):
        assert await pool.place(request(f"full {name}", chain(name), pinned=name))
    waiting = pool.place(request("waiting", chain(4), knobs=knobs, room_share=1.0))
    async with asyncio.TaskGroup() as tasks:
        placed = tasks.create_task(waiting)
        await eventually(lambda: len(pool.seats) == 1)
        pool.done("full r0")
        await drained(pool)
    assert placed.result() is not None
    pool.done("waiting")
    pool.done("full r1")


async def is_reaped(pool: Pool, client: redis.Redis, gateway: str) -> bool:
    return not await client.hexists(pool.keys.gateways, gateway) and not await client.exists(pool.keys.reaped)


async def is_exact(pool: Pool, name: str) -> bool:
    return (await pool.beat()).is_exact(name)


async def live_among_many(pool: Pool) -> None:
    """Places in a fleet that has orders. Busy replicas own the prompt of the last requests, and idle ones do not. One
    prompt is too large for every cache."""
    await register(pool, 100, capacity_tokens=250)
    await place(pool, "large", [], prompt_tokens=1000)
    for number in range(40):
        await place(pool, f"owner{number}", chain("many"), pinned=f"r{number}")
    for policy in POLICIES:
        await place(pool, policy, chain("many"), knobs=PolicyKnobs(policy))


async def keep_records(store: Store) -> None:
    """What gateways do with the records of operators, and with those of requests."""
    records = RecordStore(store, "")
    assert await records.look() == (b"", 0)
    assert await records.put([RecordChange("key/k", b"", b"1")], AuditNote("who", "what", "subject", "tenant"))
    assert await records.read() == {"key/k": b"1"}
    assert len(await records.audit(10)) == 1
    assert await records.put([RecordChange("key/k", b"1", b"")], AuditNote())
    ring = DecisionRing(store, "")
    await ring.keep({"team/id": b"text"}, LEAST_BYTES)
    assert await ring.find(["team/id"]) == [b"text"]
    await ring.drop()


async def spend(pool: Pool) -> None:
    """A request with a budget is placed, and over; then something is spent without the store."""
    budget = AccountBudget("t", "day", "tokens", 100, 0.8, "2026-11-28", 2**31, "2026-11-28/tokens/t")
    asked = request("costly", [])
    asked.bill = Bill((budget,), FREE, 1, 9)
    assert isinstance(await pool.place(asked), Placement)
    pool.done("costly", Used(0, 5))
    await drained(pool)
    pool.reservations.spent.settle(asked.bill, Used(0, 2))
    pool.reservations.count_adopted()
    await drained(pool)
    [told] = await read_spent([pool], [budget])
    assert (told.settled, told.held) == (7, 0)


async def keep_usage(store: Store) -> None:
    """What gateways do with the ledger of usage."""
    usage, hour, row = UsageStore(store, "", "gw0"), Hour("2026-11-28T14+0000", 1_795_874_400), Row("team", "", "m")
    assert await usage.add(0, 1, {hour: {row: Consumed(1)}}, 3600) == 1
    assert [await usage.rows(name) for name in await usage.hours()] == [{row: Consumed(1)}]


async def survey(url: str) -> None:
    """What the doctor must read with the gateways' user."""
    found = await Survey.open(url, 5.0)
    assert await found.pools() == ["m"]
    await found.close()


async def tell(store: Store, url: str) -> None:
    """Every call that an agent makes."""
    pool = store.pool("m")
    pool.reassert()  # the gateway had left
    async with linked(url, "r9") as link:
        await attend(link)
        await eventually(lambda: is_exact(pool, "r9"))
        asked = request("c", chain(9), pinned="r9", shape=b'{"text_bytes":[9]}')
        placed = await pool.place(asked)
        assert placed is not None
        assert await tell_measured(pool, asked, placed, 90) == 1
        await attend(link, counters={"hits": 1.0})
        assert await link.bindings([asked.tip], elsewhere_is_report=False)
        await say_all(link, gains(chain(9)))
        assert await link.residents()
        assert await link.ask("STRLEN", pool.keys.chunk(asked.tip)) == 0  # as the agent asks for LMCache's chunks
        ask_reset(pool, "r9")
        await sweep(pool, "r9")


def test_the_documentation_lists_these_commands() -> None:
    text = (Path(coordinator.__file__).parent.parent / "docs" / "security.md").read_text()
    watch = f"ACL SETUSER kvgate {' '.join(WATCHES[1:])}\n  ({' '.join(TENDS)})\n"  # the list below contains INFO
    assert watch in text
    found = re.search(r"^ACL SETUSER kvgate on .*? -@all(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    assert sorted(found[1].split()) == sorted(f"+{name}" for name in (*COMMANDS, "info"))
    agents = re.search(r"^ACL SETUSER kvagent on >PASSWORD (.*?) -@all(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert agents is not None
    assert (tuple(agents[1].split()), agents[2].split()) == (AGENT_KEYS, found[1].split())


async def test_chunks_that_the_user_may_not_see_count_for_nothing_and_stop_no_placement(
    restricted_url: str, client: redis.Redis
) -> None:
    keys = chain(1, 2)
    async with joined(restricted_url, "gw0") as pool:
        pool.register(replica("r0"))
        await client.hset(pool.keys.tiers, "r0", "- 0.9")
        await client.set(pool.keys.chunk(keys[0]), "100 kvchunk@model@1", ex=60)
        placed = await pool.place(request("a", keys))
    assert placed is not None
    assert (placed.why, placed.stored_tokens) == ("cold", 0)


async def test_a_user_limited_to_kvgates_keys_and_commands_can_do_everything(
    restricted_url: str, redis_server: RedisServer, client: redis.Redis
) -> None:
    await client.execute_command("ACL", "LOG", "RESET")
    store = Store(StoreOptions(restricted_url, budget_s=5.0), "gw0")
    pool = store.pool("m")
    async with running(store):
        assert store.is_up(), store.reason
        await live_a_little(pool)
        await choose(store)
        await tell(store, restricted_url)
        await survey(restricted_url)
        await keep_records(store)
        await keep_usage(store)
        await spend(pool)
        pool.reservations.restate_spending()
        await drained(pool)
        await OldBudgets(pool).remove()
        await client.hset(pool.keys.gateways, "gw9", f"1 {await now_ms(client) - 1}")
        await client.hset(pool.keys.flight("gw9"), "x", f"r0 life1 1 10 {chain(1)[0]}")
        await eventually(lambda: is_reaped(pool, client, "gw9"))
    denied = {entry["object"] for entry in await client.acl_log()}
    # Versions and settings are optional. redis-py introduces itself with CLIENT SETINFO.
    assert denied <= {"info", "client", "client|setinfo"}


async def test_an_agents_user_can_do_what_agents_do_and_reaches_no_record_of_operators(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    await client.execute_command("ACL", "SETUSER", "kvagent", *AGENT_RULES)
    url = redis_server.url.replace("redis://", "redis://kvagent:secret@")
    await client.execute_command("ACL", "LOG", "RESET")
    store = Store(StoreOptions(redis_server.url, budget_s=5.0), "gw0")
    async with running(store):
        pool = store.pool("m")
        pool.register(replica("r9"))
        await tell(store, url)
        await list_pool(url, pool.keys, 5.0)
        async with linked(url, "r9") as link:
            await link.change_state("ready", "asleep")
            await link.change_state("asleep", "ready")
    denied = {entry["object"] for entry in await client.acl_log()}
    assert denied <= {"client", "client|setinfo"}
    async with redis.Redis.from_url(url, protocol=2) as agent:
        own = (records_key(), audit_key(), f"{usage_key()}:hours", console_secret_key(), WATCHER)
        for key in (*own, models_key(), decisions_key(), decision_ring_key(), decision_slot_key("", 0)):
            for command in (agent.hset(key, "a", "b"), agent.set(key, "x"), agent.delete(key), agent.get(key)):
                with pytest.raises(NoPermissionError):
                    await command
            with pytest.raises(redis.ResponseError, match=r"permission|access"):
                await agent.eval("return redis.call('HSET', KEYS[1], 'a', 'b')", 1, key)


@pytest.mark.parametrize("namespace", ["", "team-a", "records", "audit"])
def test_no_pattern_of_an_agents_keys_fits_a_record_of_operators(namespace: str) -> None:
    pattern = f"{prefix(namespace)}:{{*}}:*"
    assert fnmatchcase(PoolKeys("m", namespace).own("k"), pattern)
    for other in ("", "team-a", "records", "audit", namespace):
        assert not fnmatchcase(records_key(other), pattern)
        assert not fnmatchcase(audit_key(other), pattern)
        assert not fnmatchcase(f"{usage_key(other)}:hours", pattern)
        assert not fnmatchcase(decision_slot_key(other, 1), pattern)


async def test_every_command_in_the_list_is_used(redis_server: RedisServer, client: redis.Redis) -> None:
    await client.script_flush()
    await client.config_resetstat()
    store = Store(StoreOptions(redis_server.url, budget_s=5.0), "gw0")
    async with running(store):
        await live_a_little(store.pool("m"))
        await live_among_many(store.pool("m"))
        await choose(store)
        await tell(store, redis_server.url)
        await survey(redis_server.url)
        await keep_records(store)
        await client.hset(store.pool("m").keys.gateways, "gw9", "1 1")
        await eventually(lambda: is_reaped(store.pool("m"), client, "gw9"))
    async with watching(redis_server.url) as watcher:
        await eventually(lambda: watcher.report is not None)
    used = {name.removeprefix("cmdstat_") for name in await client.info("commandstats")}
    subcommands = {"script"} if "script" in used else set()  # Redis 6.2 counts only the container command
    needed = {name for name in COMMANDS if name not in used and name.split("|")[0] not in subcommands}
    assert needed == set()


async def test_other_keys_are_out_of_its_reach(restricted_url: str) -> None:
    store = Store(StoreOptions(restricted_url, 0.02), "gw0")
    async with running(store):
        with pytest.raises(StoreRefused, match=r"(?i)no permissions"):
            await store.pool("m").read("GET", "vllm@something")


async def test_a_user_without_permission_to_load_scripts_is_told_so(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    await client.execute_command("ACL", "SETUSER", "kvgate", *(rule for rule in RULES if "script" not in rule))
    store = Store(StoreOptions(redis_server.url.replace("redis://", "redis://kvgate:secret@"), 0.02), "gw0")
    async with running(store):
        await eventually(lambda: "script" in store.reason.lower())
        with pytest.raises(StoreDown):
            await store.pool("m").place(request("a", chain(1)))


async def test_a_user_that_may_not_ask_for_scripts_loads_all_of_them(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    await client.script_flush()
    rules = [rule for rule in RULES if rule != "+script|exists"]
    await client.execute_command("ACL", "SETUSER", "kvgate", *rules)
    url = redis_server.url.replace("redis://", "redis://kvgate:secret@")
    async with running(Store(StoreOptions(url, budget_s=5.0), "gw0")) as store:
        assert store.is_up(), store.reason
        assert await client.script_exists(store.pool("m").link.required().script("beat").sha) == [True]


async def test_a_wrong_password_is_told_without_repeating_it(redis_server: RedisServer, restricted_url: str) -> None:
    store = Store(StoreOptions(restricted_url.replace(":secret@", ":wrong-guess@"), 0.02), "gw0")
    async with running(store):
        assert "invalid username-password pair" in store.reason
        assert "wrong-guess" not in store.reason


async def test_with_its_rights_the_watch_looks_after_chunks_and_no_chunk_can_be_read(
    redis_server: RedisServer, client: redis.Redis, restricted_url: str
) -> None:
    version = int((await client.info("server"))["redis_version"].split(".")[0])
    tends = [f"({' '.join(TENDS)})"] if version >= 7 else TENDS
    await client.execute_command("ACL", "SETUSER", "kvgate", *WATCHES, *tends)
    await client.execute_command("ACL", "LOG", "RESET")
    await client.config_set("notify-keyspace-events", "E$e")
    key = chunk(1)
    try:
        async with watching(restricted_url) as watcher:
            await eventually(lambda: watcher.report is not None and watcher.report.hears)
            await client.set(key, "x")
            await eventually(lambda: watcher.report is not None and watcher.report.ttls_given == 1)
            assert not holds(watcher, "not_permitted")
        denied = {entry["object"] for entry in await client.acl_log()}
        assert denied <= {"client", "client|setinfo"}
        if version >= 7:
            async with redis.Redis.from_url(restricted_url, protocol=2) as user:
                for reading in (user.get(key), user.dump(key), user.eval("return redis.call('GET', KEYS[1])", 1, key)):
                    with pytest.raises(redis.ResponseError, match=r"permission|access"):
                        await reading
    finally:
        await client.delete(key)
        await client.config_set("notify-keyspace-events", "")


async def test_without_them_it_says_so_and_placements_do_not_mind(restricted_url: str, client: redis.Redis) -> None:
    await client.execute_command("ACL", "SETUSER", "kvgate", "+info")
    store = Store(StoreOptions(restricted_url, budget_s=5.0), "gw0")
    async with watching(restricted_url) as watcher, running(store):
        await eventually(lambda: holds(watcher, "not_permitted"))
        await live_a_little(store.pool("m"))
