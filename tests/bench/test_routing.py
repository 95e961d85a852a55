"""A small `python -m bench.routing`: its requests, its systems, and its report."""

from __future__ import annotations

import random

import pytest

from bench.routing.fleets import Fleet, running, simulated
from bench.routing.measure import Row, measure
from bench.routing.mixes import Mix, Workload
from bench.routing.systems import PICKERS, System, systems
from bench.workloads import Session, one_turn, question, text, user, words
from tests.programs import needs

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


SYSTEMS = systems(["pinned", "prefix_kv_aware", "pickers", "pickers_answers_pass", "pickers_and_gateways"], [2])
ENVOYS = {each.name: needs("envoy") for each in SYSTEMS if each.name in PICKERS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "system", [pytest.param(each, marks=ENVOYS.get(each.name, ()), id=each.label) for each in SYSTEMS]
)
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
