"""Engines whose events name no sessions: token ids identify their prompts."""

from __future__ import annotations

import pytest

from coordinator.agent.blocks import BlockTable
from coordinator.agent.kv_events import Removed, Stored
from coordinator.agent.residency import Residency
from coordinator.agent.token_id_matching import TokenIdMatcher
from tests.coordinator.agent.prompts import IMAGE, bound, brief, chain, removed, stored, told


class Held:
    """A block table and its matcher."""

    def __init__(self, *events: Stored) -> None:
        self.table = BlockTable()
        self.matcher = TokenIdMatcher(self.table)
        for event in events:
            self.table.store(event)
            self.matcher.store(event)
        self.find = self.matcher.find

    def remove(self, event: Removed) -> None:
        self.matcher.remove(self.table.remove(event))


def test_a_prompt_is_found_by_its_tokens_as_far_as_it_is_held() -> None:
    held = Held(stored([1, 2, 3], tokens=[*range(12)]), stored([4], 2, tokens=[7, 7, 7, 7]))
    assert held.find([*range(12)], ()) == [1, 2, 3]
    assert held.find([*range(8), 7, 7, 7, 7, 5], ()) == [1, 2, 4]
    assert held.find([*range(10)], ()) == [1, 2]
    assert held.find([5, *range(12)], ()) == []
    held.remove(removed(3))
    assert held.find([*range(12)], ()) == [1, 2]


def test_a_block_that_another_medium_still_holds_is_found() -> None:
    tokens = [*range(4)]
    held = Held(stored([1], tokens=tokens), stored([1], tokens=tokens, medium="cpu"))
    held.remove(removed(1))
    assert held.find(tokens, ()) == [1]
    held.remove(removed(1, medium="cpu"))
    assert held.find(tokens, ()) == []


def test_nothing_is_found_of_what_is_not_held() -> None:
    tokens = [1, 2, 3, 4]
    held = Held(stored([1], tokens=tokens))
    held.matcher.clear()
    assert held.find(tokens, ()) == []
    assert Held().find(tokens, ()) == []
    assert Held(stored([1], tokens=tokens, medium="storage")).find(tokens, ()) == []
    assert Held(stored([1], tokens=tokens, is_prefix=False)).find(tokens, ()) == []


def test_of_images_that_look_alike_the_one_that_was_asked_for_is_found_else_the_last_stored() -> None:
    tokens = [1, IMAGE, IMAGE, IMAGE, IMAGE, 2, 3, 4]
    held = Held(
        *(
            stored([h, h + 1], tokens=tokens, extra=[[[name, 1]], [[name, -3]]])
            for h, name in ((10, "a"), (20, "b"), (30, "c"))
        )
    )
    assert held.find(tokens, ["b"]) == [20, 21]
    assert held.find(tokens, ()) == [30, 31]
    held.remove(removed(31, 30))
    assert held.find(tokens, ["c"]) == [20, 21]


@pytest.mark.parametrize(("version", "is_needed"), [((), True), ((0, 29), True), ((0, 30), False), ((1, 0), False)])
def test_the_version_tells_whether_an_engine_names_sessions(version: tuple[int, ...], is_needed: bool) -> None:
    residency = Residency()
    residency.expect(4, 0, version)
    assert residency.token_ids.is_needed is is_needed


def test_an_engine_that_names_a_session_needs_no_token_ids() -> None:
    residency = Residency()
    residency.apply([told([1], session=None), told([2], 1, session=None)])
    assert residency.token_ids.is_needed
    residency.apply([told([3], session="someone")])
    assert not residency.token_ids.is_needed


def test_an_engine_that_names_sessions_costs_no_memory_for_tokens() -> None:
    residency = Residency()
    residency.expect(4, 0, (0, 30))
    residency.apply([told([1], session=None, tokens=[1, 2, 3, 4])])
    assert residency.token_ids.find([1, 2, 3, 4], ()) == []


def test_token_ids_that_come_after_the_first_session_event_change_nothing() -> None:
    """A gateway asked for them while nobody knew that the engine names sessions."""
    with_ids, without = bound(chain(4, 8, 10)), bound(chain(4, 8, 10))
    for residency in (with_ids, without):
        residency.apply([told([1, 2, 3], session="tip", tokens=[*range(12)])])
    expected = without.measure("tip", 12)
    assert with_ids.measure("tip", 12, [*range(12)]) == expected
    assert brief(expected)


def test_without_sessions_a_measured_prompt_is_found_by_its_tokens() -> None:
    residency = bound(chain(4, 8, 10))
    residency.apply([told([1, 2, 3], session=None, tokens=[*range(12)])])
    assert brief(residency.measure("tip", 10, [*range(10)])) == ["+k4@1", "+k8@2", "+tip@2"]
    assert brief(residency.apply([removed(2)])) == ["-k8", "-tip"]
    assert residency.measure("tip", 10, [*range(10)]) == []
    assert brief(residency.reset(relearn=False)) == ["reset"]
    assert residency.token_ids.find([*range(10)], ()) == []
