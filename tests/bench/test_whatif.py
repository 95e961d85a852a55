"""Cost expressions in virtual time: runs are fast and repeatable, and use the same mixes as the benchmark."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.routing.candidates import Load, Order
from bench.routing.mixes import MIXES, Mix, Workload
from bench.routing.whatif import Holders, Variant, VirtualTimeLoop, Weights, run, variant
from bench.workloads import about, text, user, words

SMALL = Mix("small", "questions about six documents", 2, 8_000, 4, lambda seed: _documents(seed))


def _documents(seed: int) -> Workload:
    rng = random.Random(seed)
    contexts = [[words(text(rng, 8000))] for _ in range(6)]
    sessions = about(rng, contexts, [rng.randrange(6) for _ in range(60)], user(words("system")))
    return Workload([], sessions, list(range(60)))


def test_an_hour_takes_no_time() -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() == pytest.approx(3600)
    finally:
        loop.close()


def test_a_seed_gives_the_same_figures_every_time_and_another_seed_others() -> None:
    first = run(SMALL, Variant(), 1)
    assert sum(first.requests) == len(first.ttft_s) == 60
    assert first.figures == run(SMALL, Variant(), 1).figures != run(SMALL, Variant(), 2).figures


def test_where_computing_costs_nothing_less_is_found_in_the_caches() -> None:
    blind = run(SMALL, variant("charged=0,displaced=0"), 1).figures["cached %"]
    assert run(SMALL, Variant(), 1).figures["cached %"] > blind + 10


def test_a_router_that_knows_speeds_gives_slow_replicas_less() -> None:
    knows, counts_tokens = (run(SMALL, variant(f"slow=8,speeds={switch}"), 1) for switch in ("on", "off"))
    assert knows.requests[1] < counts_tokens.requests[1]
    assert knows.wall_s < counts_tokens.wall_s


def test_a_variant_names_its_weights() -> None:
    assert variant("charged=2,copy=8") == Variant(Weights(charged=2, copy=8))
    assert variant("slow=4,speeds=off") == Variant(slow=4, speeds=False)
    assert variant("copy=8,candidates=on") == Variant(Weights(copy=8), candidates=True)
    for bad, message in (("nonsense=1", "nonsense"), ("candidates=perhaps", "on or off"), ("copy=x", "x")):
        with pytest.raises(ValueError, match=message):
            variant(bad)


@pytest.mark.parametrize("mix", MIXES.values(), ids=lambda mix: mix.name)
def test_a_larger_fleet_gets_as_much_for_each_replica(mix: Mix) -> None:
    larger = mix.on(4 * mix.replicas, requests=10**6)
    assert larger.concurrency == 4 * mix.concurrency
    assert len(larger.make(1).order) == pytest.approx(4 * len(mix.make(1).order), rel=0.01)
    assert len(mix.on(4 * mix.replicas, requests=30).make(1).order) <= max(30, 48) * 4 * mix.replicas


def test_a_look_at_candidates_finds_about_what_a_look_at_all_replicas_finds() -> None:
    mix = MIXES["rag"].on(48, requests=12)
    look_at_all, candidates = (run(mix, variant(f"candidates={each}"), 1) for each in ("off", "on"))
    assert sum(candidates.requests) == sum(look_at_all.requests) > 500
    assert candidates.figures["cached %"] == pytest.approx(look_at_all.figures["cached %"], abs=3)
    assert candidates.figures["busiest /mean"] < look_at_all.figures["busiest /mean"] + 0.5


def test_a_prefix_is_held_by_fewer_replicas_the_longer_it_is() -> None:
    holders = Holders()
    for replica, blocks in enumerate(([1, 2, 3], [1, 2], [1, 2], [9])):
        for block in blocks:
            holders.add(block, replica)
    assert holders.depths([1, 2, 3, 4]) == [(3, {0}), (2, {0, 1, 2})]
    holders.discard(3, 0)
    assert holders.depths([1, 2, 3, 4]) == [(2, {0, 1, 2})]
    assert holders.depths([5]) == []


def test_an_order_follows_the_scores_and_takes_equals_at_random() -> None:
    loads = [Load() for _ in range(20)]
    order = Order(lambda load: load.active, loads)
    taken = {replica for _ in range(200) for replica in order.first(2, random.Random(_))}
    assert taken == set(range(20))
    for replica, load in enumerate(loads):
        load.active = 20 - replica
        order.update(replica, load)
    assert order.first(3, random.Random(1)) == [19, 18, 17]
    assert len(order.first(50, random.Random(1))) == 20
