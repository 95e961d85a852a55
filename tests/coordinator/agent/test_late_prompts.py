"""Engines whose events name no sessions: prompts that are measured before their events come."""

from __future__ import annotations

import pytest

from coordinator.agent.agent_store import Measured
from coordinator.agent.chains import Binding
from coordinator.agent.late_prompts import LATE_S, LatePrompts
from coordinator.agent.residency import Residency
from tests.coordinator.agent.prompts import bound, brief, chain, told

PROMPT = Measured("tip", 10, tuple(range(10)))
FIRST = told([1], session=None, tokens=[0, 1, 2, 3])
SECOND = told([2], 1, session=None, tokens=[4, 5, 6, 7])


@pytest.fixture
def residency() -> Residency:
    return bound(chain(4, 8, 10))


def test_a_prompt_is_kept_back_until_all_of_its_blocks_are_named(residency: Residency) -> None:
    late = LatePrompts()
    assert late.due([PROMPT], residency, 0.0) == []
    residency.apply([FIRST])
    assert late.due([], residency, 0.5) == []
    residency.reset(relearn=True)
    assert late.due([], residency, 1.0) == []
    residency.apply([FIRST, SECOND])
    assert late.due([], residency, 1.5) == [PROMPT]
    assert brief(residency.measure("tip", 10, PROMPT.token_ids)) == ["+k4@1", "+k8@2", "+tip@2"]
    assert late.due([], residency, 2.0) == []


def test_in_time_it_is_taken_as_far_as_it_is_held(residency: Residency) -> None:
    late = LatePrompts()
    residency.apply([FIRST])
    assert late.due([PROMPT], residency, 0.0) == []
    assert late.due([], residency, LATE_S - 0.1) == []
    assert late.due([], residency, LATE_S) == [PROMPT]
    assert late.due([], residency, LATE_S) == []


def test_who_needs_no_blocks_is_not_kept_back(residency: Residency) -> None:
    residency.apply([FIRST, SECOND])
    others = [Measured("tip", 10, ()), Measured("unknown", 10, PROMPT.token_ids)]
    assert LatePrompts().due([*others, PROMPT], residency, 0.0) == [*others, PROMPT]
    residency.apply([told([9], session="someone")])  # so it names sessions
    asked = Measured("tip", 12, tuple(range(12)))
    assert LatePrompts().due([asked], residency, 0.0) == [asked]


def test_the_oldest_are_taken_when_too_many_tokens_are_kept_back(residency: Residency) -> None:
    for tip in ("old", "new"):
        residency.bind(Binding(tip, [tip], [10], [0], 10))
    old, new = (Measured(tip, 150_000, tuple(range(150_000))) for tip in ("old", "new"))
    late = LatePrompts()
    assert late.due([old], residency, 0.0) == []
    assert late.due([new], residency, 0.5) == [old]
    assert late.due([], residency, 1.0) == []
