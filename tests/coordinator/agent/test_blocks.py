"""The blocks that an engine holds, according to its events."""

from __future__ import annotations

from coordinator.agent.blocks import BlockTable
from coordinator.agent.kv_events import Stored
from tests.coordinator.agent.prompts import SIZE, removed, stored


def table(*events: Stored) -> BlockTable:
    made = BlockTable()
    for event in events:
        made.store(event)
    return made


# -- counting ----------------------------------------------------------------------------------------------------


def test_blocks_stored_in_doubt_are_uncertain_until_counts_are_trusted_again() -> None:
    held = BlockTable()
    held.doubt()
    held.store(stored([1]))
    held.store(stored([1]))
    held.trust()
    held.store(stored([2]))
    held.store(stored([2]))
    assert held.remove(removed(1, 2)) == [1]


def test_a_block_that_was_uncertain_is_counted_when_it_is_stored_anew() -> None:
    held = table(stored([1]))
    held.doubt()
    held.trust()
    held.remove(removed(1))
    held.store(stored([1]))
    held.store(stored([1]))
    assert held.remove(removed(1)) == []


def test_a_block_known_by_a_report_alone_is_uncertain() -> None:
    held = BlockTable()
    held.store(stored([1]), reporting=True)
    held.store(stored([1]))
    assert held.remove(removed(1)) == [1]


# -- groups, media and sizes -------------------------------------------------------------------------------------


def test_blocks_of_groups_without_full_attention_are_ignored_coming_and_going() -> None:
    held = table(stored([1]), stored([1], group=1, is_prefix=False))
    assert held.remove(removed(1, group=1)) == []
    assert held.remove(removed(1, group=0)) == [1]


def test_what_other_media_hold_is_ignored() -> None:
    held = table(stored([1], medium="storage"))
    assert 1 not in held
    assert held.remove(removed(1, medium="storage")) == []


def test_parts_of_a_block_are_no_blocks() -> None:
    held = table(stored([1, 2]), stored([3], parent=2, tokens=[0, 0], block_size=2))
    assert (3 in held, held.block_size) == (False, SIZE)
    assert held.remove(removed(3)) == []


def test_chunks_of_another_size_in_a_store_behind_the_engine_are_no_blocks() -> None:
    held = table(stored([1]), stored([7], tokens=[0] * 256, block_size=256, medium="cpu"))
    assert (7 in held, held.block_size) == (False, SIZE)


# -- paths -------------------------------------------------------------------------------------------------------


def test_an_offloaded_block_without_tokens_has_no_place_until_it_is_told() -> None:
    held = table(stored([2], tokens=[], medium="cpu", block_size=0))
    assert (held.path(2), held.medium_of(2)) == (None, "cpu")
    held.store(stored([1, 2]))
    assert held.path(2) == [1, 2]


def test_an_assumed_block_is_known_by_its_place_and_gone_at_its_first_removal() -> None:
    held = table(stored([9]))
    held.assume(3, "gpu", 2)
    held.store(stored([4], parent=3))
    assert held.path(4) == [0, 0, 3, 4]
    held.store(stored([1, 2, 3]))
    assert held.path(4) == [1, 2, 3, 4]
    assert held.remove(removed(3)) == [3]


def test_assuming_a_block_that_is_held_changes_nothing() -> None:
    held = table(stored([1, 2]), stored([1, 2]))
    held.assume(2, "cpu", 5)
    assert (held.path(2), held.medium_of(2)) == ([1, 2], "gpu")
    assert held.remove(removed(2)) == []
