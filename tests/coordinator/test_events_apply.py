"""How the entries of a replica's event stream change the map."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    dump,
    now_ms,
    numbers,
    own,
    owners,
    place,
    replica,
)
from tests.coordinator.stream import (
    BLOCK_HASH,
    Stream,
    attend,
    gains,
    lead,
    linked,
    losses,
)
from tests.redis_server import RedisServer


async def test_an_entry_is_applied_once_however_often_it_is_offered(stream: Stream, client: redis.Redis) -> None:
    keys = chain(1, 2)
    await stream.say(*gains(keys))
    [entry] = await stream.unread()
    assert (await stream.offer(entry, ""))[0] == "ok"
    before = await dump(client, "kvgate:*")
    assert await stream.offer(entry, "") == ["moved", f"{entry[0]} 1"]
    assert await stream.offer(entry, "") == ["moved", f"{entry[0]} 1"]
    assert await dump(client, "kvgate:*") == before
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}


async def test_an_entry_is_refused_while_the_one_before_it_is_not_applied(stream: Stream, client: redis.Redis) -> None:
    keys = chain(1)
    await stream.say(*gains(keys))
    await stream.say(*losses(keys))
    first, second = await stream.unread()
    assert await stream.offer(second, f"{first[0]} 1") == ["moved", ""]
    assert [answer[0] for answer in await stream.apply_all()] == ["ok", "ok"]
    assert await owners(client, keys[0]) == {}


async def test_who_does_not_hold_the_lease_changes_nothing(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await stream.say(*gains(chain(1)))
    [entry] = await stream.unread()
    before = await dump(client, "kvgate:*")
    assert await stream.offer(entry, "", who="gw1") == ["lost"]
    assert await dump(client, "kvgate:*") == before


async def test_what_a_coordinator_read_and_did_not_apply_is_applied_by_the_next(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    """gw0 dies between reading and applying. Its write still arrives, after gw1 has taken over."""
    await stream.say(*gains(chain(1)))
    await stream.say(*gains(chain(2)))
    read = await stream.unread()
    assert await lead(pool, "gw1") == {}
    await client.hset(KEYS.leases, "events:r0", f"gw0 {await now_ms(client) - 1}")
    await client.hset(KEYS.leases, "applier:gw0", await now_ms(client) - 1)
    assert await lead(pool, "gw1") == {"r0": ""}
    assert [answer[0] for answer in await stream.apply_all("gw1")] == ["ok", "ok"]
    before = await dump(client, "kvgate:*")
    assert await stream.offer(read[0], "") == ["lost"]
    assert await dump(client, "kvgate:*") == before
    assert await stream.cursor() == f"{read[1][0]} 2"


async def test_an_entry_of_a_past_life_only_moves_the_cursor(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await stream.say(*gains(chain(1)))
    await pool.register(replica("r0", "life2"))
    before = await dump(client, "*:own:*", "*:owned_tokens", "*:held:*", "*:replicas")
    [[status, _, missing]] = await stream.apply_all()
    assert (status, missing) == ("ok", 0)
    assert await dump(client, "*:own:*", "*:owned_tokens", "*:held:*", "*:replicas") == before
    assert await stream.unread() == []


async def test_the_age_of_an_entry_is_told(stream: Stream) -> None:
    await stream.link.publish(gains(chain(1)), 5.0, 0)
    [[_, lag_ms, _]] = await stream.apply_all()
    assert 5_000 <= lag_ms < 60_000


async def test_residency_confirms_a_claim_and_keeps_its_use(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1, 2)
    used = await now_ms(client) + 5
    await own(client, keys[0], "r0", hits=16, last_use_ms=used)
    await client.hset(KEYS.owned_tokens, "r0", 100)
    await client.zadd(KEYS.held("r0"), {keys[0]: used - 1})
    number = await stream.say(*gains(keys, span=96))
    await stream.apply_all()
    record = (await owners(client, keys[0]))["r0"]
    expected = ["life1", "resident", "gpu", "96", "16", str(used), str(number), "96", f"{BLOCK_HASH:016x}"]
    assert record == expected
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 192}
    assert await client.zscore(KEYS.held("r0"), keys[0]) == used - 1
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.matched_kind, placed.matched_entry) == ("r0", "resident", str(number))
    assert (placed.matched_tokens, placed.backlog_tokens) == (192, 8)


async def test_an_eviction_removes_residency(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1, 2, 3)
    await stream.say(*gains(keys))
    await stream.say(*losses(keys[1:]))
    await stream.apply_all()
    assert [list(await owners(client, key)) for key in keys] == [["r0"], [], []]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}
    assert await client.zrange(KEYS.held("r0"), 0, -1) == keys[:1]


async def test_an_eviction_leaves_a_claim(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    """The request that claimed the key computes it again, after the events in this entry."""
    keys = chain(1, 2)
    await place(pool, "a", keys, pinned="r0")
    await drained(pool)
    await stream.say(*losses(keys))
    await stream.apply_all()
    assert [(await owners(client, key))["r0"][1] for key in keys] == ["claim", "claim"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}


async def test_a_key_moves_to_another_medium(stream: Stream, client: redis.Redis) -> None:
    keys = chain(1)
    await stream.say(*gains(keys))
    await stream.say(*gains(keys, medium="cpu"))
    await stream.apply_all()
    assert (await owners(client, keys[0]))["r0"][1:4] == ["resident", "cpu", "100"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}


async def test_two_replicas_hold_the_same_key(
    stream: Stream, pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    keys = chain(1)
    async with linked(redis_server.url, "r1", "agent1") as link:
        await attend(link)
        await lead(pool)
        other = Stream(pool, client, link, "r1")
        for each in (stream, other):
            await each.say(*gains(keys))
            await each.apply_all()
        assert sorted(await owners(client, keys[0])) == ["r0", "r1"]
        await stream.say(*losses(keys))
        await stream.apply_all()
        assert sorted(await owners(client, keys[0])) == ["r1"]
        assert await numbers(client, KEYS.owned_tokens) == {"r1": 100}
