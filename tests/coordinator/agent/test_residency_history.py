"""Blocks from before the agent started: reports, losses, and the state of the previous agent."""

from __future__ import annotations

import pytest

from coordinator.agent import residency as residency_module
from coordinator.agent.chains import Binding
from coordinator.agent.residency import Evicted, Reset, Resident
from tests.coordinator.agent.prompts import IMAGE, SIZE, bound, brief, chain, held, removed, told

# -- prompts whose beginning is unknown --------------------------------------------------------------------------


def test_a_session_whose_beginning_was_never_told_means_that_there_is_more_to_learn() -> None:
    residency = bound(chain(4, 8, 16))
    assert residency.apply([told([3], 2)]) == []
    assert residency.is_relearning
    assert brief(residency.apply([told([1, 2]), told([4, 5], 3)])) == ["+k4@1", "+k8@2", "+tip@4"]


def test_a_report_tells_of_the_beginning_and_said_again_changes_nothing() -> None:
    residency = bound(chain(4, 8, 16, is_report=True))
    residency.relearn()
    assert brief(residency.apply([told([1, 2]), told([3, 4], 2)])) == ["+k4@1", "+k8@2", "+tip@4"]
    for _ in range(3):
        assert residency.apply([told([1, 2])]) == []
    assert brief(residency.apply([removed(2)])) == ["-k8"]


def test_while_relearning_the_first_removal_means_gone() -> None:
    residency = bound(chain(4, 8))
    residency.relearn()
    residency.apply([told([1, 2]), told([1, 2])])
    assert brief(residency.apply([removed(2)])) == ["-tip"]


def test_relearning_ends_when_the_whole_cache_was_stored_anew() -> None:
    residency = bound(chain(4, tip="reported", is_report=True))
    residency.capacity_tokens = 3 * SIZE
    residency.relearn()
    residency.apply([told([1, 2, 3, 4], session="reported")])
    assert residency.is_relearning, "blocks that are reported were there before"
    residency.apply([told([5, 6], session=None)])
    assert residency.is_relearning
    residency.apply([told([7], 6, session=None)])
    assert not residency.is_relearning
    residency.apply([told([8], session=None), told([8], session=None), removed(8)])
    assert 8 in residency.table


def test_without_a_known_capacity_relearning_does_not_end() -> None:
    residency = bound()
    residency.relearn()
    residency.apply([told([*range(1, 1000)], session=None)])
    assert residency.is_relearning


def test_losing_events_resets_and_relearns_and_chains_stay_bound() -> None:
    residency = bound(chain(4, 8))
    residency.apply([told([1, 2])])
    assert residency.reset(relearn=True) == [Reset()]
    assert (residency.is_relearning, held(residency)) == (True, {})
    assert residency.is_bound("tip")
    assert brief(residency.apply([told([1, 2])])) == ["+k4@1", "+tip@2"]


# -- the state of the previous agent -----------------------------------------------------------------------------

TOLD = Resident("k8", 8, 4, "gpu", 2)


def test_with_a_complete_history_only_what_it_bears_out_is_assumed() -> None:
    residency = bound()
    residency.apply([told([1, 2], session=None)])
    residency.assume(TOLD, is_complete=True)
    residency.assume(Resident("gone", 12, 4, "gpu", 3), is_complete=True)
    assert list(residency.residents()) == [TOLD]
    assert brief(residency.apply([removed(2)])) == ["-k8"]


def test_without_a_complete_history_what_was_said_is_believed_until_it_is_removed() -> None:
    residency = bound()
    residency.assume(TOLD, is_complete=False)
    assert list(residency.residents()) == [TOLD]
    assert brief(residency.apply([removed(2)])) == ["-k8"]


def test_what_goes_on_from_an_assumed_block_is_known_from_there() -> None:
    residency = bound(chain(4, 8, 12, 16))
    residency.assume(TOLD, is_complete=False)
    assert brief(residency.apply([told([3, 4], 2)])) == ["+k12@3", "+tip@4"]
    assert held(residency) == {"k8": 2, "k12": 3, "tip": 4}
    assert not residency.is_relearning


def test_behind_blocks_that_are_not_known_no_image_is_taken_for_another() -> None:
    """The chain has two images. Only the second lies in blocks that the events describe."""
    residency = bound(Binding("tip", ["first", "second", "tip"], [5, 10, 20], [1, 2, 2], 24))
    residency.assume(Resident("other", 8, 8, "gpu", 2), is_complete=False)
    second = told([3, 4, 5, 6], 2, tokens=[0, IMAGE, IMAGE, 0, *[0] * 12], extra=[[["b", 1]], None, None, None])
    assert brief(residency.apply([second])) == ["+first@6", "+second@6", "+tip@6"]


def test_an_assumed_key_is_on_the_medium_where_its_block_is() -> None:
    residency = bound()
    residency.apply([told([1, 2], session=None)])
    residency.assume(Resident("k8", 8, 4, "cpu", 2), is_complete=False)
    assert list(residency.residents()) == [TOLD]


def test_what_is_known_already_is_not_assumed_otherwise() -> None:
    residency = bound(chain(4, 8))
    residency.apply([told([1, 2])])
    residency.assume(Resident("k4", 8, 8, "cpu", 2), is_complete=True)
    assert held(residency) == {"k4": 1, "tip": 2}


# -- limits on growth --------------------------------------------------------------------------------------------


def test_of_the_many_keys_that_end_in_one_block_those_named_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short questions about one document all end in the document's last block. The document's key is in every chain;
    the tips are not."""
    monkeypatch.setattr(residency_module, "_MAX_KEYS_AT_BLOCK", 3)
    residency = bound()
    residency.apply([told([1, 2], session=None)])
    dropped = []
    for question in range(5):
        tip = f"q{question}"
        residency.bind(chain(8, 10, tip=tip))
        dropped += [
            change.key for change in residency.apply([told([50 + question], 2, tip)]) if isinstance(change, Evicted)
        ]
    assert dropped == ["q0", "q1", "q2"]
    assert held(residency) == {"k8": 2, "q3": 2, "q4": 2}


def test_keys_that_are_gone_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "_MAX_GONE", 1)
    residency = bound(chain(4, 8, 12))
    residency.apply([told([1, 2, 3]), removed(3), removed(2)])
    assert brief(residency.apply([told([2, 3], 1, session=None)])) == ["+k8@2"]
    assert len(residency) == 2


def test_keys_that_were_forgotten_are_said_again_when_their_prompt_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency_module, "_MAX_GONE", 1)
    residency = bound(chain(4, 8, 12))
    residency.apply([told([1, 2, 3])])
    residency.measure("tip", 12)
    residency.apply([removed(3, 2, 1)])
    assert brief(residency.apply([told([1])])) == ["+k4@1"]
    assert sorted(brief(residency.apply([told([2, 3], 1)]))) == ["+k8@2", "+tip@3"]


def test_sessions_that_are_never_bound_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "_MAX_UNBOUND", 2)
    residency = bound()
    residency.apply([told([block, 10 * block], session=f"s{block}") for block in (1, 2, 3)])
    residency.apply([told([50, 51], 20, session="s2"), told([4, 40], session="s4")])
    assert [brief(residency.bind(chain(4, tip=f"s{block}"))) for block in (1, 2, 3, 4)] == [
        [],
        ["+s2@51"],
        [],
        ["+s4@4"],
    ]
