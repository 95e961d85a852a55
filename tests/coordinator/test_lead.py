"""Which applier holds which event stream: leases, even shares, hand-over."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, calls_of, chain, hash_of, now_ms, replica
from tests.coordinator.stream import Stream, agent_record, gains, lead


async def agents(client: redis.Redis, count: int) -> list[str]:
    names = [f"r{i}" for i in range(count)]
    for name in names:
        await agent_record(client, name)
    return names


async def beats(pool: Pool, *gateways: str, rounds: int = 8) -> dict[str, set[str]]:
    """Each gateway's applier sends a few heartbeats in turn. Returns the streams that each holds in the end."""
    held: dict[str, set[str]] = {}
    for _ in range(rounds):
        for who in gateways:
            held[who] = set(await lead(pool, who))
    return held


async def die(client: redis.Redis, *who: str) -> None:
    """Lets the leases of these gateways end."""
    lapsed_ms = await now_ms(client) - 1
    for field, value in (await hash_of(client, KEYS.leases)).items():
        if field.removeprefix("applier:") in who:
            await client.hset(KEYS.leases, field, lapsed_ms)
        elif value.split(" ")[0] in who:
            await client.hset(KEYS.leases, field, f"{value.split(' ')[0]} {lapsed_ms}")


async def test_who_is_alone_holds_everything_from_the_first_beat(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 5)
    assert set(await lead(pool, "gw0")) == set(names)


async def test_a_lease_brings_the_cursor(pool: Pool, client: redis.Redis) -> None:
    await agents(client, 2)
    await client.hset(KEYS.cursors, "r1", "17-0 4")
    assert await lead(pool, "gw0") == {"r0": "", "r1": "17-0 4"}


async def test_without_agents_there_is_nothing_to_hold(pool: Pool) -> None:
    assert await lead(pool, "gw0") == {}


@pytest.mark.parametrize(("replicas", "gateways"), [(6, 3), (7, 3), (2, 3), (8, 8), (1, 1)])
async def test_shares_are_even_and_nothing_is_left_over(
    pool: Pool, client: redis.Redis, replicas: int, gateways: int
) -> None:
    names = await agents(client, replicas)
    held = await beats(pool, *(f"gw{i}" for i in range(gateways)), rounds=2 * replicas)
    assert sorted(name for some in held.values() for name in some) == names
    assert max(len(some) for some in held.values()) <= -(-replicas // gateways)


async def test_nobody_takes_more_than_his_share_of_what_is_free(pool: Pool, client: redis.Redis) -> None:
    await beats(pool, "gw0", "gw1", "gw2", rounds=1)
    await agents(client, 9)
    held = await beats(pool, "gw0", "gw1", "gw2", rounds=1)
    assert [len(some) for some in held.values()] == [3, 3, 3]


async def test_who_joins_is_handed_one_replica_a_beat(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 4)
    assert set(await lead(pool, "gw0")) == set(names)
    assert await lead(pool, "gw1") == {}
    assert len(await lead(pool, "gw0")) == 3
    assert len(await lead(pool, "gw1")) == 1
    assert len(await lead(pool, "gw0")) == 2
    assert len(await lead(pool, "gw1")) == 2
    steady = await beats(pool, "gw0", "gw1")
    assert steady == await beats(pool, "gw0", "gw1")


async def test_a_replica_stays_exact_while_its_stream_is_handed_over(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 4)
    for name in names:
        await pool.register(replica(name))
    await lead(pool, "gw0")
    await lead(pool, "gw1")
    assert len(await lead(pool, "gw0")) == 3
    fleet = await pool.beat()
    assert all(fleet.is_exact(name) for name in names)
    await lead(pool, "gw0", leaving=True)
    fleet = await pool.beat()
    assert all(fleet.is_exact(name) for name in names)


async def test_no_stream_has_two_holders_while_it_is_handed_over(pool: Pool, client: redis.Redis) -> None:
    await agents(client, 7)
    held: dict[str, set[str]] = {}
    for who in ["gw0", "gw0", "gw1", "gw0", "gw2", "gw1", "gw0", "gw2", "gw1", "gw3"] * 3:
        held[who] = set(await lead(pool, who))
        leases = await hash_of(client, KEYS.leases)
        holders = {f: v.split(" ")[0] for f, v in leases.items() if f.startswith("events:")}
        for name in held[who]:
            assert holders[f"events:{name}"] == who
    everything = [name for some in held.values() for name in some]
    assert len(everything) == len(set(everything)) == 7


async def test_a_lease_is_not_taken_while_it_lasts(pool: Pool, client: redis.Redis) -> None:
    await agents(client, 1)
    await lead(pool, "gw0")
    assert await beats(pool, "gw1") == {"gw1": set()}


async def test_the_leases_of_who_died_are_taken_when_they_lapse(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 6)
    held = await beats(pool, "gw0", "gw1", "gw2")
    assert {who: len(some) for who, some in held.items()} == {"gw0": 2, "gw1": 2, "gw2": 2}
    await die(client, "gw2")
    held = await beats(pool, "gw0", "gw1", rounds=1)
    assert sorted(held["gw0"] | held["gw1"]) == names
    assert {len(some) for some in held.values()} == {3}


async def test_who_was_only_paused_goes_on_with_what_nobody_took(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 2)
    await lead(pool, "gw0")
    await die(client, "gw0")
    assert set(await lead(pool, "gw0")) == set(names)


@pytest.mark.parametrize("who", ["gw0", "gw1"], ids=["who was paused", "another"])
async def test_who_takes_a_stream_whose_lease_had_lapsed_has_its_agent_say_everything_again(
    stream: Stream, pool: Pool, client: redis.Redis, who: str
) -> None:
    await stream.say(*gains(chain(1)))
    await stream.apply_all()
    await lead(pool, "gw0")
    await lead(pool, "gw0")
    assert await hash_of(client, KEYS.asks) == {}
    await client.hset(KEYS.leases, "events:r0", f"gw0 {await now_ms(client) - 1}")
    await lead(pool, who)
    assert await hash_of(client, KEYS.asks) == {"r0": "restate"}


async def test_who_takes_what_was_given_back_asks_for_nothing(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await stream.say(*gains(chain(1)))
    await stream.apply_all()
    await lead(pool, "gw0", leaving=True)
    await lead(pool, "gw1")
    assert await hash_of(client, KEYS.asks) == {}


async def test_who_leaves_gives_everything_back_at_once(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 4)
    await beats(pool, "gw0", "gw1")
    assert await lead(pool, "gw0", leaving=True) == {}
    assert "gw0" not in " ".join([*(await hash_of(client, KEYS.leases)).values()])
    assert set(await lead(pool, "gw1")) == set(names)


async def test_gateways_that_do_not_apply_have_no_share(pool: Pool, client: redis.Redis) -> None:
    """Every gateway sends heartbeats, but only some apply streams. No stream may wait for a gateway that never asks."""
    names = await agents(client, 5)
    for i in range(4):
        await client.hset(KEYS.gateways, f"gw{i}", f"1 {await now_ms(client) + 60_000}")
    for _ in range(4):
        assert set(await lead(pool, "gw0")) == set(names)


async def test_the_leases_of_other_chores_are_left_alone(pool: Pool, client: redis.Redis) -> None:
    await agents(client, 1)
    await pool.beat()
    chores = {f: v for f, v in (await hash_of(client, KEYS.leases)).items() if f in ("tick", "worker")}
    await lead(pool, "gw0")
    await lead(pool, "gw0", leaving=True)
    left = await hash_of(client, KEYS.leases)
    assert left.pop("events:r0").startswith("- ")
    assert left == chores


async def test_who_has_its_share_renews_it_without_a_look_at_the_others(pool: Pool, client: redis.Redis) -> None:
    names = await agents(client, 6)
    held = await beats(pool, "gw0", "gw1")
    await pool.beat()
    await client.hset(KEYS.cursors, sorted(held["gw0"])[0], "17-0 4")
    before = await hash_of(client, KEYS.leases)
    await client.config_resetstat()
    renewed = await lead(pool, lease_ms=90_000, known=held["gw0"])
    calls = await calls_of(client)
    assert renewed == dict.fromkeys(held["gw0"], "") | {sorted(held["gw0"])[0]: "17-0 4"}
    assert calls.keys().isdisjoint({"hgetall", "hkeys"})
    after = await hash_of(client, KEYS.leases)
    changed = {field for field in after if after[field] != before.get(field)}
    assert changed == {"applier:gw0", *(f"events:{name}" for name in held["gw0"])}
    assert len(names) == len(held["gw0"]) + len(held["gw1"])


async def test_who_only_renews_learns_from_heartbeats_what_is_free_and_what_is_too_much(
    pool: Pool, client: redis.Redis
) -> None:
    await agents(client, 2)
    held = set(await lead(pool, "gw0"))
    await pool.beat()
    await agent_record(client, "r2")
    assert set(await lead(pool, known=held)) == held, "no heartbeat has noticed it yet"
    await pool.beat()
    held = set(await lead(pool, known=held))
    assert held == {"r0", "r1", "r2"}
    await pool.beat()
    assert await lead(pool, "gw1") == {}
    await pool.beat()
    kept = set(await lead(pool, known=held))
    assert len(kept) == 2
    await pool.beat()
    assert set(await lead(pool, "gw1")) == held - kept


async def test_a_stream_whose_agent_was_forgotten_is_not_renewed(pool: Pool, client: redis.Redis) -> None:
    await agents(client, 2)
    held = set(await lead(pool))
    await client.hdel(KEYS.agents, "r1")
    await pool.beat()
    assert set(await lead(pool, known=held)) == {"r0"}


@pytest.mark.parametrize("why", ["a lease has lapsed", "another has a lease", "a cursor", "the note is old", "nothing"])
async def test_who_cannot_be_sure_of_its_leases_looks_at_all(pool: Pool, client: redis.Redis, why: str) -> None:
    await agents(client, 3)
    held = set(await lead(pool, "gw0"))
    await pool.beat()
    if why == "a lease has lapsed":
        await client.hset(KEYS.cursors, "r1", "17-0 4")
        await client.hset(KEYS.leases, "events:r1", f"gw0 {await now_ms(client) - 1}")
    elif why == "another has a lease":
        await client.hset(KEYS.leases, "events:r1", f"gw1 {await now_ms(client) + 60_000}")
    elif why == "a cursor":
        await client.hset(KEYS.cursors, "r1", "garbage")
    elif why == "the note is old":
        await client.hdel(KEYS.view, "?")
    await client.config_resetstat()
    found = set(await lead(pool, known=held))
    assert found == (held - {"r1"} if why == "another has a lease" else held)
    assert ("hgetall" in await calls_of(client)) == (why != "nothing")
    assert await hash_of(client, KEYS.asks) == ({"r1": "restate"} if why in ("a lease has lapsed", "a cursor") else {})


async def test_who_has_far_too_much_gives_a_quarter_of_it_back_at_a_time(pool: Pool, client: redis.Redis) -> None:
    await agents(client, 32)
    assert len(await lead(pool, "gw0")) == 32
    await lead(pool, "gw1")
    assert [len(await lead(pool, "gw0")) for _ in range(3)] == [28, 25, 22]
