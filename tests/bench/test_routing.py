"""A small `python -m bench.routing`: its requests, its systems, and its report."""

from __future__ import annotations

import random

import pytest

from bench.load import pinned_spread
from bench.routing.fleets import Counters, Fleet, cache_share, running, simulated
from bench.routing.measure import QueueSampler, Row, measure
from bench.routing.mixes import MIXES, Mix, Workload
from bench.routing.systems import NAMES, System, systems
from bench.workloads import Session, one_turn, question, text, user, words

SEED = 3
CONVERSATIONS, TURNS = 4, 3


def conversations(_seed: int = SEED) -> Workload:
    rng = random.Random(SEED)
    sessions = [
        Session(group, tuple((user(words(text(rng, 2000)), question(rng, turn)),) for turn in range(TURNS)))
        for group in range(CONVERSATIONS)
    ]
    order = [group for _ in range(TURNS) for group in range(CONVERSATIONS)]
    return Workload([one_turn(9, user(words("before")))], sessions, order)


SMALL = Mix("small", "four conversations", 2, 16_000, 4, conversations)


async def routed(system: System) -> Row:
    with simulated(SMALL, speed=50) as fresh, fresh() as fleet:
        return await routed_by(system, fleet)


async def routed_by(system: System, fleet: Fleet) -> Row:
    return await measure(fleet, SMALL, SMALL.make(SEED), system, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("system", systems(["pinned", "oracle", "prefix_kv_aware"], [2]), ids=lambda each: each.label)
async def test_conversations_find_their_turns_and_are_split_evenly(system: System) -> None:
    row = await routed(system)
    assert (row.requests, row.failed) == (CONVERSATIONS * TURNS, 0)
    assert len(row.ttft_ms) == row.requests
    assert row.cache_share > 0.4  # of three turns, the second finds one turn cached and the third two
    assert sum(row.split) == pytest.approx(1, abs=0.001)
    assert max(row.split) <= 0.75
    assert (row.wrong_share is None) == (system.instances == 0)


@pytest.mark.slow
async def test_taking_turns_finds_less_and_the_engines_say_so() -> None:
    (pinned,) = systems(["pinned"], [1])
    (turns,) = systems(["random"], [1])
    assert (await routed(turns)).cache_share < (await routed(pinned)).cache_share


@pytest.mark.slow
async def test_replicas_that_run_already_begin_each_run_with_empty_caches() -> None:
    (pinned,) = systems(["pinned"], [1])
    events = "events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558"
    with (
        simulated(SMALL, speed=50) as fresh,
        fresh() as fleet,
        running(SMALL, [f"{fleet.urls['r0']}/", f"{fleet.urls['r1']},{events}"]) as again,
    ):
        rows = []
        for _ in range(2):
            with again() as found:
                rows.append(await routed_by(pinned, found))
    assert (found.urls, found.model, found.block_tokens) == (fleet.urls, fleet.model, fleet.block_tokens)
    assert found.beside == {"r0": "", "r1": events}
    assert rows[0].cache_share == rows[1].cache_share > 0.4


def test_every_system_has_a_name_and_other_names_are_refused() -> None:
    labels = [system.label for system in systems(NAMES, [1, 4])]
    assert len(set(labels)) == len(labels)
    assert {"KVGate", "KVGate x4", "KVGate, random", "sglang-router x2", "sglang-router-tight", "oracle"} <= set(labels)
    with pytest.raises(KeyError):
        systems(["nonsense"], [1])


@pytest.mark.parametrize("mix", MIXES.values(), ids=lambda mix: mix.name)
def test_a_mix_is_the_same_for_a_seed_and_another_for_another(mix: Mix) -> None:
    assert mix.make(1) == mix.make(1) != mix.make(2)
    workload = mix.make(1)
    turns = {index: len(session.turns) for index, session in enumerate(workload.sessions)}
    assert {index: workload.order.count(index) for index in turns} == turns


async def test_perfect_pinning_is_even() -> None:
    sessions = [one_turn(group, user(words("x"))) for group in (0, 0, 0, 2, 4, 4)]
    spread = pinned_spread(["a", "b"], sessions)
    urls = [await spread(session, {}) for session in sessions]
    assert sorted(urls.count(url) for url in ("a", "b")) == [3, 3]
    assert len({url for url, session in zip(urls, sessions, strict=True) if session.group == 4}) == 1


def test_shares_are_of_all_engines_together() -> None:
    assert cache_share([Counters(100, 50, 1), Counters(300, 250, 1)]) == 0.75
    assert Counters(100, 50, 3).since(Counters(60, 40, 1)) == Counters(40, 10, 2)


def test_the_peak_load_is_that_of_a_replica_whose_queue_grows() -> None:
    sampler = QueueSampler(2)
    sampler.active = [[6] * 20, [2] * 20]
    sampler.waiting = [[1] * 20, [0] * 20]
    assert sampler.peak_load() is None
    sampler.waiting[1][9] = 3  # this replica has less to do than the other
    assert sampler.peak_load() is None
    sampler.waiting[0][9] = 3
    assert sampler.peak_load() == 1.5
    assert QueueSampler(2).peak_load() is None
