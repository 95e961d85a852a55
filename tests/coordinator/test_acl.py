"""A Redis user that may do nothing but what coordination needs."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown, StoreRefused
from coordinator.pool import Pool, Reservation
from coordinator.responses import find, remember
from coordinator.store import Store, StoreSettings
from coordinator.worker import trim
from tests.coordinator.stage import chain, drained, eventually, now_ms, replica, request, running
from tests.redis_server import RedisServer

COMMANDS = (
    *("ping", "eval", "evalsha", "script|load", "time"),
    *("exists", "get", "set", "del", "incr"),
    *("hget", "hgetall", "hset", "hdel", "hincrby", "hlen"),
    *("zadd", "zrem", "zcard", "zscore", "zrange", "zrangebyscore"),
)
RULES = ("reset", "on", ">secret", "resetkeys", "~kvgate:*", "-@all", *(f"+{name}" for name in COMMANDS))


@pytest.fixture
async def restricted_url(redis_server: RedisServer, client: redis.Redis) -> str:
    await client.execute_command("ACL", "SETUSER", "kvgate", *RULES)
    return redis_server.url.replace("redis://", "redis://kvgate:secret@")


async def live_a_little(pool: Pool) -> None:
    """Everything that a gateway ever does with its pool."""
    for name in ("r0", "r1"):
        pool.register(replica(name, capacity_tokens=250))
    asked = request("a", chain(1, 2, 3))
    placed = await pool.place(asked)
    assert placed is not None
    pool.first_token("a")
    pool.report(placed.replica, placed.incarnation, "failure", 1, 100)
    pool.report(placed.replica, placed.incarnation, "success", 1, 100)
    for policy in ("round_robin", "random"):
        other = request(policy, chain(1, policy), knobs=type(asked.knobs)(policy), release="a")
        placed = await pool.place(other)
        assert placed is not None
        pool.withdraw(other, placed)
    assert await pool.explain(asked)
    pool.adopt(Reservation("b", "r0", "life1", 10, "-"))
    pool.reassert()
    pool.done("b")
    await remember(pool, "resp_1", "r0", "life1", None)
    assert await find(pool, "resp_1", None) == ("r0", "life1")
    await drained(pool)
    for _ in range(2):
        fleet = await pool.beat()
        for record in fleet.replicas.values():
            await trim(pool, record, fleet)
    await pool.beat(leaving=True)


async def test_a_user_limited_to_kvgates_keys_and_commands_can_do_everything(
    restricted_url: str, redis_server: RedisServer, client: redis.Redis
) -> None:
    await client.execute_command("ACL", "LOG", "RESET")
    store = Store(StoreSettings(restricted_url, budget_s=5.0), "gw0")
    pool = store.pool("m")
    async with running(store):
        assert store.is_up(), store.reason
        await live_a_little(pool)
        await client.hset(pool.keys.gateways, "gw9", f"1 {await now_ms(client) - 1}")
        await client.hset(pool.keys.flight("gw9"), "x", f"r0 life1 1 10 {chain(1)[0]}")
        await pool.beat()
        assert not await client.exists(pool.keys.flight("gw9"))
    denied = {entry["object"] for entry in await client.acl_log()}
    # Answers about versions and settings are welcome, not needed; redis-py introduces itself with CLIENT SETINFO.
    assert denied <= {"info", "client", "client|setinfo"}


async def test_every_command_in_the_list_is_used(redis_server: RedisServer, client: redis.Redis) -> None:
    await client.config_resetstat()
    store = Store(StoreSettings(redis_server.url, budget_s=5.0), "gw0")
    async with running(store):
        await live_a_little(store.pool("m"))
        await client.hset(store.pool("m").keys.gateways, "gw9", "1 1")
        await store.pool("m").beat()
    used = {name.removeprefix("cmdstat_") for name in await client.info("commandstats")}
    subcommands = {"script"} if "script" in used else set()  # Redis 6.2 counts the container
    needed = {name for name in COMMANDS if name not in used and name.split("|")[0] not in subcommands}
    assert needed == set()


async def test_other_keys_are_out_of_its_reach(restricted_url: str) -> None:
    store = Store(StoreSettings(restricted_url), "gw0")
    async with running(store):
        with pytest.raises(StoreRefused, match="no permissions"):
            await store.pool("m").read("GET", "vllm@something")


async def test_a_user_without_permission_to_load_scripts_is_told_so(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    await client.execute_command("ACL", "SETUSER", "kvgate", *(rule for rule in RULES if "script" not in rule))
    store = Store(StoreSettings(redis_server.url.replace("redis://", "redis://kvgate:secret@")), "gw0")
    async with running(store):
        await eventually(lambda: "script" in store.reason.lower())
        with pytest.raises(StoreDown):
            await store.pool("m").place(request("a", chain(1)))


async def test_a_wrong_password_is_told_without_repeating_it(redis_server: RedisServer, restricted_url: str) -> None:
    store = Store(StoreSettings(restricted_url.replace(":secret@", ":wrong-guess@")), "gw0")
    async with running(store):
        assert "invalid username-password pair" in store.reason
        assert "wrong-guess" not in store.reason
