"""Large subsets: a placement looks at a few candidates, and chooses as well as if it looked at all."""

from __future__ import annotations

import json
import random
from collections import Counter
from statistics import mean

import pytest
import redis.asyncio as redis

from coordinator import breaker
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool import subsets
from coordinator.pool.pool import Pool
from coordinator.subset import Subset
from gateway.settings.policies import POLICIES
from tests.coordinator.reference import STATES, Stage, below_the_guard, costs
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    hash_of,
    joined,
    now_ms,
    own,
    place,
    register,
    replica,
    request,
)
from tests.polling import eventually
from tests.redis_server import RedisServer

MANY = 40
KNOBS = PolicyKnobs()


async def emptied(pool: Pool, client: redis.Redis) -> None:
    """Removes all but the gateway."""
    pool.records.clear()
    pool.live.clear()
    for key in [key async for key in client.scan_iter("*") if key != KEYS.gateways]:
        await client.delete(key)


async def test_a_look_at_a_few_is_as_good_as_a_look_at_all(pool: Pool, client: redis.Redis) -> None:
    """The regret is what the chosen replica costs more than the cheapest one that may be chosen."""
    dice = random.Random(1)
    regrets, least, looked_at = [], [], []
    for number, kind in enumerate(STATES):
        stage = Stage(pool, kind, 150, dice)
        await emptied(pool, client)
        now = await now_ms(client)
        await stage.write(now)
        for turn in range(20):
            prompt = await stage.prompt(turn, now)
            answer = await pool.explain(prompt.request(stage.subset, dice.getrandbits(31), KNOBS))
            assert answer is not None
            decision = json.loads(answer)
            allowed = [name for name in stage.good if name not in prompt.tried]
            assert decision["replica"] in allowed, (number, kind)
            cost = costs(stage.fleet, allowed, prompt)
            least.append(min(cost[name] for name in below_the_guard(stage.fleet, allowed)))
            regrets.append(cost[decision["replica"]] - least[-1])
            looked_at.append(len(decision["replicas"]))
    assert max(looked_at) < 32
    assert mean(regrets) <= 0.01 * mean(least)
    assert sorted(regrets)[len(regrets) * 99 // 100] <= 128


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_takes_an_allowed_replica_in_every_state(
    pool: Pool, client: redis.Redis, policy: str
) -> None:
    dice = random.Random(policy)
    for kind in STATES:
        stage = Stage(pool, kind, MANY, dice)
        await emptied(pool, client)
        now = await now_ms(client)
        await stage.write(now)
        for turn in range(5):
            prompt = await stage.prompt(turn, now)
            asked = prompt.request(stage.subset, dice.getrandbits(31), PolicyKnobs(policy))
            asked.order = dice.sample(sorted(stage.fleet), 32)
            placed = await pool.place(asked)
            assert placed is not None
            assert placed.replica in stage.good, kind
            assert placed.replica not in prompt.tried
            assert placed.why != "last_resort"


@pytest.fixture
async def many(pool: Pool) -> Pool:
    """A pool with as many replicas as need orders."""
    await register(pool, MANY, capacity_tokens=100_000)
    await place(pool, "first", [])
    pool.done("first")
    await drained(pool)
    return pool


async def chosen(pool: Pool, count: int = 60, **changes: object) -> set[str]:
    """The replicas that requests without a prompt in common get, each alone."""
    found = set()
    for number in range(count):
        found.add((await place(pool, "one", chain(number), seed=number * 8 + 1, **changes)).replica)
        pool.done("one")
        await drained(pool)
    return found


async def orders(client: redis.Redis, digest: str) -> dict[str, dict[str, float]]:
    names = ("good", "in_flight", "load", "free", "out")
    return {name: dict(await client.zrange(f"{KEYS.subset(digest)}:{name}", 0, -1, withscores=True)) for name in names}


async def is_past(client: redis.Redis, ms: float) -> bool:
    return await now_ms(client) > ms


def subset_of(pool: Pool) -> Subset:
    return Subset.of(pool.records)


async def test_equal_replicas_are_not_taken_in_order_of_their_names(many: Pool) -> None:
    assert len(await chosen(many)) > 20


async def test_a_replica_that_dies_hangs_or_breaks_gets_nothing_until_it_is_back(
    many: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "OPEN_MS", 600_000)
    stay = {f"r{number}" for number in range(3, MANY)}
    await many.register(replica("r0", state="dead", capacity_tokens=100_000))
    many.change_state("r1", "life1", "ready", "hung")
    for _ in range(3):
        many.report("r2", "life1", "failure")
    await drained(many)
    assert await chosen(many, 150) <= stay
    out = (await orders(client, subset_of(many).digest))["out"]
    assert out["r0"] == out["r1"] == float("inf")
    assert set(out) == {"r0", "r1", "r2"}
    await many.register(replica("r0", capacity_tokens=100_000))
    many.change_state("r1", "life1", "hung", "ready")
    await drained(many)
    assert set((await orders(client, subset_of(many).digest))["out"]) == {"r2"}
    assert {"r0", "r1"} <= await chosen(many, 400)


async def test_a_broken_replica_is_probed_once_when_its_time_has_come(
    many: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(breaker, "OPEN_MS", 1)
        for _ in range(3):
            many.report("r5", "life1", "failure")
        await drained(many)
    open_until_ms = (await orders(client, subset_of(many).digest))["out"]["r5"]
    await eventually(lambda: is_past(client, open_until_ms))
    all_but_one = [f"r{number}" for number in range(MANY) if number != 5]
    first = await place(many, "probe", [], tried=all_but_one)
    assert (first.replica, first.why) == ("r5", "cold")
    await drained(many)
    second = await place(many, "second", [], tried=all_but_one)
    assert second.why == "last_resort", "a probe is out"
    many.report("r5", "life1", "success")
    await drained(many)
    assert "r5" in (await orders(client, subset_of(many).digest))["good"]


async def test_where_all_are_dead_one_is_tried_all_the_same(many: Pool) -> None:
    for number in range(MANY):
        await many.register(replica(f"r{number}", state="dead", capacity_tokens=100_000))
    assert (await place(many, "a", chain(1))).why == "last_resort"


async def test_what_an_older_gateway_changes_is_not_chosen_and_is_put_right(many: Pool, client: redis.Redis) -> None:
    """Its scripts change records and sums, and no order."""
    dead = [f"r{number}" for number in range(30)]
    records = await hash_of(client, KEYS.replicas)
    await client.hset(KEYS.replicas, mapping={name: records[name].replace("ready", "dead") for name in dead})
    for policy in POLICIES:
        assert not await chosen(many, 20, knobs=PolicyKnobs(policy), order=["r3", "r39"]) & set(dead)
    await client.hset(KEYS.active, mapping={f"r{number}": 9 for number in range(30, 39)})
    await many.subsets.keep()
    assert await chosen(many, 10, knobs=PolicyKnobs("least_loaded")) == {"r39"}


async def test_each_model_name_has_its_own_replicas(many: Pool, client: redis.Redis) -> None:
    adapter = Subset.of(["r3", "r30", "r31"])
    half = Subset.of([f"r{number}" for number in range(20)])
    assert await chosen(many, 60, serving=adapter) == adapter.replicas
    assert await chosen(many, 60, serving=half) <= half.replicas
    await place(many, "kept", [], pinned="r3", serving=adapter)
    for subset in (subset_of(many), half):
        assert (await orders(client, subset.digest))["in_flight"]["r3"] >= 1
        assert await client.hget(KEYS.subset_active, subset.digest) == "1"


async def test_a_subset_that_no_gateway_uses_any_more_is_removed(
    many: Pool, redis_server: RedisServer, client: redis.Redis
) -> None:
    half = Subset.of([f"r{number}" for number in range(20)])
    async with joined(redis_server.url, "gw1") as other:
        await place(other, "theirs", [], serving=half)
    await client.hset(KEYS.subsets, half.digest, f"20 {await now_ms(client) - 1}")
    await many.subsets.keep()
    left = [key async for key in client.scan_iter(f"{KEYS.subset(half.digest)}*")]
    assert left == []
    assert set((await hash_of(client, KEYS.subsets_of)).values()) == {subset_of(many).digest}


@pytest.mark.parametrize("value", ["a string", {"garbage": "x"}, [("stranger", 5.0), ("r1", float("inf"))], None])
@pytest.mark.parametrize(
    "name", ["subsets", "subsets_of", "subset_active", "", ":good", ":in_flight", ":load", ":free", ":out"]
)
async def test_whatever_is_in_the_keys_of_subsets_placements_go_on_and_keep_mends_it(
    many: Pool, client: redis.Redis, name: str, value: str | dict[str, str] | list[tuple[str, float]] | None
) -> None:
    key = getattr(KEYS, name) if name.startswith("subset") else f"{KEYS.subset(subset_of(many).digest)}{name}"
    await client.delete(key)
    if isinstance(value, str):
        await client.set(key, value)
    elif isinstance(value, dict):
        await client.hset(key, mapping=value)
    elif isinstance(value, list):
        await client.zadd(key, dict(value))
    for policy in POLICIES:
        assert await chosen(many, 3, knobs=PolicyKnobs(policy), order=["r3", "r39"]) <= set(many.records)
    for _ in range(2):
        await many.subsets.keep()
        await chosen(many, 1)
    found = await orders(client, subset_of(many).digest)
    assert set(found["good"]) | set(found["out"]) == set(many.records)
    assert set(found["load"]) >= set(found["good"])
    subsets_of = await hash_of(client, KEYS.subsets_of)
    assert {subsets_of[replica] for replica in many.records} == {subset_of(many).digest}
    await chosen(many, 3)


async def test_a_prefix_that_many_own_is_tried_where_every_breaker_is_open(many: Pool, client: redis.Redis) -> None:
    keys, now = chain(1, 2), await now_ms(client)
    for number in range(5, MANY):
        for key in keys:
            await client.hset(KEYS.own(key), f"r{number}", f"life1 claim gpu 100 0 {now} other")
    for number in range(MANY):
        await client.hset(KEYS.breakers, f"r{number}", f"3 {now + 50_000} 0")
    await many.subsets.keep()
    assert (await place(many, "a", keys)).why == "last_resort"


async def test_consistent_hash_leaves_busy_replicas_alone_while_others_are_idle(
    many: Pool, client: redis.Redis
) -> None:
    await client.hset(KEYS.active, mapping={f"r{number}": 5 for number in range(32)})
    await many.subsets.keep()
    knobs = PolicyKnobs("consistent_hash", max_active_requests=5)
    order = [f"r{number}" for number in range(32)]
    assert await chosen(many, 10, knobs=knobs, order=order) <= {f"r{number}" for number in range(32, MANY)}


async def test_many_subsets_make_a_heartbeat_no_longer(many: Pool, client: redis.Redis) -> None:
    """Each change of a fleet makes another subset."""
    for number in range(20, MANY):
        await place(many, f"{number}", [], serving=Subset.of([f"r{each}" for each in range(number)]))
    await many.subsets.keep()
    await client.config_resetstat()
    await many.subsets.keep()
    stats = await client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] <= 9
    assert stats["cmdstat_zadd"]["calls"] <= 8 * MANY * 4


async def test_who_made_the_last_answer_is_found_beside_a_busy_owner_of_more(many: Pool, client: redis.Redis) -> None:
    """As when an answer is asked for again: r0 holds the whole prompt, r1 made the answer in it."""
    keys = chain("system", "question", "answer", "next question")
    for name, depth in (("r0", 4), ("r1", 2)):
        for key in keys[:depth]:
            await own(client, key, name)
    await client.hset(KEYS.backlog_tokens, "r0", 20_000)
    asked = request("a", keys, tokens=[1000, 1010, 9000, 9020], prompt_tokens=9020, answer=(2, 3))
    assert json.loads(await many.explain(asked) or b"")["replica"] == "r1"


@pytest.mark.parametrize("why", ["tried", "dead, and an older gateway has said so"])
async def test_a_prompt_stays_with_its_owners_where_the_least_loaded_one_cannot_be_chosen(
    many: Pool, client: redis.Redis, why: str
) -> None:
    """As for a retry: r0 has failed, and its load was given back."""
    keys = chain("system", "conversation")
    for number in range(11):
        await own(client, keys[0], f"r{number}")
    await own(client, keys[1], "r0")
    await client.hset(KEYS.backlog_tokens, mapping={f"r{number}": 1500 for number in range(1, 11)})
    await many.subsets.keep()
    tried = ["r0"] if why == "tried" else []
    if not tried:
        record = (await hash_of(client, KEYS.replicas))["r0"]
        await client.hset(KEYS.replicas, "r0", record.replace("ready", "dead"))
    for number in range(20):
        asked = request(f"{number}", keys, tokens=[20_000, 20_100], prompt_tokens=20_100, tried=tried, seed=number)
        assert json.loads(await many.explain(asked) or b"")["replica"] in {f"r{owner}" for owner in range(1, 11)}


async def loaded(pool: Pool, client: redis.Redis, **sums: dict[str, int]) -> None:
    """Gives replicas their load, and puts the orders right."""
    for name, values in sums.items():
        await client.hset(getattr(KEYS, name), mapping=values)
    await pool.subsets.keep()


async def explained(pool: Pool, **changes: object) -> set[str]:
    """The replicas that several placements would get."""
    decided = [await pool.explain(request(f"{number}", [], seed=number, **changes)) for number in range(20)]
    return {json.loads(decision or b"")["replica"] for decision in decided}


@pytest.mark.parametrize("tried", [[], ["r0"]])
async def test_a_long_prompt_goes_where_fewer_requests_are_in_flight_though_the_backlog_is_larger(
    many: Pool, client: redis.Redis, tried: list[str]
) -> None:
    two = dict.fromkeys(many.records, 2)
    await loaded(many, client, active=two | {"r5": 1} | dict.fromkeys(tried, 0), backlog_tokens={"r5": 200})
    assert await explained(many, prompt_tokens=20_000, tried=tried) == {"r5"}


async def test_an_idle_replica_whose_cache_is_full_hides_no_better_one(many: Pool, client: redis.Redis) -> None:
    three, some = dict.fromkeys(many.records, 3), [f"r{number}" for number in range(1, 7)]
    await loaded(
        many,
        client,
        active=three | dict.fromkeys(some, 2) | {"r0": 0, "r7": 1},
        backlog_tokens=dict.fromkeys(some, 144) | {"r7": 500},
        owned_tokens={"r0": 100_000},
    )
    assert await explained(many, prompt_tokens=5000) == {"r7"}


async def test_a_copy_of_a_shared_prefix_goes_to_the_largest_cache(pool: Pool, client: redis.Redis) -> None:
    await register(pool, MANY, capacity_tokens=20_000)
    await pool.register(replica("r39", capacity_tokens=400_000))
    keys, now = chain("document"), await now_ms(client)
    await client.hset(KEYS.own(keys[0]), "r0", f"life1 claim gpu 4000 80 {now} other")
    await place(pool, "first", [])
    await loaded(pool, client, active={"r0": 1}, backlog_tokens={"r0": 20_000})
    for number in range(20):
        asked = request(f"{number}", [*keys, *chain(number)], tokens=[4000, 4100], prompt_tokens=4100, seed=number)
        assert json.loads(await pool.explain(asked) or b"")["replica"] == "r39"


async def test_the_load_guard_knows_the_mean_of_the_whole_fleet(many: Pool, client: redis.Redis) -> None:
    keys = chain("document")
    await own(client, keys[0], "r0")
    await loaded(many, client, active=dict.fromkeys(many.records, 20) | {"r0": 35})
    asked = request("a", keys, tokens=[24_000], prompt_tokens=24_000)
    assert json.loads(await many.explain(asked) or b"")["replica"] != "r0"


async def test_equals_get_about_equally_many_wherever_their_names_stand(pool: Pool) -> None:
    await register(pool, 17)
    found: Counter[str] = Counter()
    for number in range(340):
        found[(await place(pool, "one", [], seed=number * 8 + 1)).replica] += 1
        pool.done("one")
        await drained(pool)
    assert len(found) == 17
    assert min(found.values()) >= 10


async def test_strangers_leave_the_orders_though_replicas_are_out(many: Pool, client: redis.Redis) -> None:
    for number in range(5):
        await many.register(replica(f"r{number}", state="dead", capacity_tokens=100_000))
    key = f"{KEYS.subset(subset_of(many).digest)}:load"
    await client.zadd(key, {f"stranger{number}": -5.0 for number in range(5)})
    await many.subsets.keep()
    assert await client.zcard(key) == MANY - 5


async def test_of_many_subsets_those_that_are_not_in_use_go_soon(
    many: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that changes every second would have dozens, and each makes every request dearer."""
    monkeypatch.setattr(subsets, "_RECENTLY_S", 0.0)
    for number in range(20, 23):
        await place(many, f"{number}", [], serving=Subset.of([f"r{each}" for each in range(number)]))
    await many.subsets.keep()
    assert len(many.subsets._declared) == 4
    await place(many, "more", [], serving=Subset.of([f"r{each}" for each in range(30)]))
    await many.subsets.keep()
    assert not many.subsets._declared


@pytest.mark.parametrize("num_guarded", [1, 4])
async def test_where_the_least_loaded_owners_have_too_many_requests_another_owner_is_found(
    many: Pool, client: redis.Redis, num_guarded: int
) -> None:
    keys = chain("document", *range(5))
    owners = [f"r{number}" for number in range(8)]
    for name in owners:
        for key in keys:
            await own(client, key, name)
    idle, guarded = dict.fromkeys(many.records, 1), owners[:num_guarded]
    await loaded(
        many,
        client,
        active=idle | dict.fromkeys(owners, 2) | dict.fromkeys(guarded, 12),
        backlog_tokens=dict.fromkeys(many.records, 2000) | dict.fromkeys(owners, 3000) | dict.fromkeys(guarded, 0),
        owned_tokens=dict.fromkeys(owners, 50_000),
    )
    asked = request("a", keys, tokens=[4000 * (at + 1) for at in range(len(keys))], prompt_tokens=24_000)
    assert json.loads(await many.explain(asked) or b"")["why"] == "hit"
