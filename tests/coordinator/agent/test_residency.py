"""How prefix keys change when their blocks are stored and removed, one rule per test."""

from __future__ import annotations

import pytest

from coordinator.agent.engine_session import mode_of
from coordinator.agent.kv_events import Cleared
from coordinator.agent.residency import Evicted, Reset, Residency, Resident
from coordinator.registry import PARTIAL, SESSION, UNCONFIRMED
from tests.coordinator.agent.prompts import SIZE, bound, brief, chain, held, removed, stored, told

# -- becoming resident -------------------------------------------------------------------------------------------


def test_a_prompt_that_is_cached_up_to_its_last_blocks_is_told_by_their_parents() -> None:
    residency = bound(chain(8, tip="a"), chain(4, 8, 16, tip="b"))
    residency.apply([told([1, 2], session="a")])
    assert brief(residency.apply([told([3, 4], 2, session="b")])) == ["+k4@1", "+k8@2", "+b@4"]


def test_a_block_that_is_stored_alone_is_a_prompts_only_once_that_is_measured() -> None:
    residency = bound(chain(8, tip="a"), chain(4, 8, 12, tip="b"))
    residency.apply([told([1, 2], session="a")])
    assert brief(residency.apply([told([3], 2, session="b")])) == ["+k4@1", "+k8@2", "+b@2"]
    assert brief(residency.measure("b", 12)) == ["+b@3"]


@pytest.mark.parametrize("measured", [8, 9, 11])
@pytest.mark.parametrize("estimate", [8, 11, 12, 16, 20])
def test_no_block_of_an_answer_counts_as_one_of_the_prompt(estimate: int, measured: int) -> None:
    residency = bound(chain(8, estimate=estimate))
    residency.apply([told([1, 2])])
    for block in range(3, 9):
        residency.apply([told([block], block - 1)])
        assert [(each.tokens, each.block_hash) for each in residency.residents()] == [(8, 2)]
    residency.measure("tip", measured)
    assert [(each.tokens, each.block_hash) for each in residency.residents()] == [(measured, 2)]


def test_no_block_of_two_answers_to_one_prompt_counts_as_one_of_the_prompt() -> None:
    residency = bound(chain(8, estimate=15))
    residency.apply([told([1, 2])])
    for block, parent in ((3, 2), (13, 2), (4, 3), (14, 13)):
        residency.apply([told([block], parent)])
        assert held(residency) == {"tip": 2}


def test_no_block_of_an_answer_that_was_told_before_the_chain_was_known_counts_as_one_of_the_prompt() -> None:
    residency = Residency()
    residency.apply([told([1, 2]), told([3], 2), told([4], 3)])
    assert brief(residency.bind(chain(8, estimate=15))) == ["+tip@2"]


def test_a_prompt_that_is_cached_whole_is_told_by_the_first_block_of_its_answer() -> None:
    residency = bound(chain(8, tip="a"), chain(4, 9, tip="b"))
    residency.apply([told([1, 2], session="a")])
    assert brief(residency.apply([told([7], 2, session="b")])) == ["+k4@1", "+b@2"]


def test_a_prompt_shorter_than_a_block_has_nothing_to_watch() -> None:
    residency = bound(chain(2, 3))
    assert residency.apply([told([1])]) == []
    assert residency.measure("tip", 3) == []


# -- binding and measuring ---------------------------------------------------------------------------------------


def test_a_chain_that_is_bound_again_keeps_what_was_measured() -> None:
    residency = bound(chain(4, 8))
    residency.apply([told([1, 2])])
    residency.measure("tip", 8)
    assert residency.bind(chain(4, 8, estimate=50)) == []
    assert residency.apply([told([3], 2)]) == []
    assert held(residency) == {"k4": 1, "tip": 2}


def test_a_key_that_turns_out_to_end_within_the_first_block_is_taken_back() -> None:
    residency = bound(chain(3, 6, estimate=8))
    assert brief(residency.apply([told([1, 2])])) == ["+k3@1", "+tip@2"]
    assert brief(residency.measure("tip", 6)) == ["-k3", "+tip@1"]


def test_the_end_of_one_prompt_is_exact_within_another() -> None:
    """The shorter prompt has more tokens per byte: 8 of 16 tokens, but 20 of 120 bytes."""
    residency = bound(chain(8, tip="k8"))
    residency.apply([told([1, 2], session="k8")])
    residency.measure("k8", 8)
    longer = chain(4, 8, 16, tip="long")
    longer.text_bytes = [10, 20, 120]
    residency.bind(longer)
    assert brief(residency.apply([told([3, 4], 2, session="long")])) == ["+k4@1", "+long@4"]
    assert held(residency) == {"k4": 1, "k8": 2, "long": 4}


def test_chains_that_share_a_key_do_not_move_it_to_and_fro() -> None:
    residency = bound(chain(8, 16, tip="a"), chain(8, 16, tip="b"))
    residency.apply([told([1, 2, 3, 4], session="a")])
    residency.measure("a", 16)
    residency.apply([told([5, 6], 2, session="b")])
    assert residency.measure("b", 13) != []
    assert held(residency)["k8"] == 2


def test_a_key_that_was_placed_for_certain_is_not_moved_by_a_prompt_on_its_way() -> None:
    residency = bound(chain(9, 10, tip="a"), chain(9, 11, tip="b", estimate=9))
    residency.apply([told([1, 2], session="a")])
    residency.measure("a", 10)
    residency.apply([removed(2, 1)])
    assert sorted(brief(residency.apply([told([1, 2], session="b")]))) == ["+a@2", "+b@2", "+k9@2"]


def test_a_key_ends_no_later_than_the_blocks_that_its_chains_have_in_common() -> None:
    residency = bound(chain(12, 13, tip="a"), chain(12, 17, tip="b"))
    residency.apply([told([1, 2, 3], session="a")])
    assert held(residency) == {"k12": 3, "a": 3}
    assert brief(residency.apply([told([13, 14], 2, session="b")])) == ["+k12@2", "+b@14"]


def test_nothing_is_measured_for_who_is_not_bound_or_without_a_length() -> None:
    residency = bound(chain(4, 8))
    residency.apply([told([1, 2])])
    assert residency.measure("other", 8) == []
    assert residency.measure("tip", 0) == []


# -- leaving -----------------------------------------------------------------------------------------------------


def test_a_prompt_computed_again_while_it_is_held_does_not_end_with_its_first_chunk() -> None:
    residency = bound(chain(4, 8, 12))
    residency.apply([told([1, 2, 3])])
    residency.measure("tip", 12)
    assert residency.apply([told([1]), told([2], 1), told([3], 2)]) == []
    assert residency.apply([removed(3)]) == []


def test_when_the_whole_cache_is_cleared_nothing_holds_and_nothing_is_in_doubt() -> None:
    residency = bound(chain(4, 8))
    residency.capacity_tokens = 100 * SIZE
    residency.relearn()
    residency.apply([told([1, 2])])
    assert residency.apply([Cleared()]) == [Reset()]
    assert (held(residency), len(residency), len(residency.table)) == ({}, 0, 0)
    assert not residency.is_relearning
    assert residency.apply([removed(2)]) == []
    assert brief(residency.apply([told([1, 2])])) == ["+k4@1", "+tip@2"]


# -- media -------------------------------------------------------------------------------------------------------


def test_keys_follow_their_blocks_between_the_gpu_and_the_cpu() -> None:
    residency = bound(chain(4, 8))
    residency.apply([told([1, 2])])
    copied = told([2], 1, session=None, medium="cpu")
    assert residency.apply([copied]) == []
    assert residency.apply([removed(2)]) == [Resident("tip", 8, 4, "cpu", 2)]
    assert residency.apply([told([2], 1, session=None)]) == [Resident("tip", 8, 4, "gpu", 2)]
    assert residency.apply([removed(2, medium="cpu")]) == []
    assert residency.apply([removed(2)]) == [Evicted("tip")]


def test_a_reset_of_the_gpus_cache_leaves_what_the_cpu_holds() -> None:
    residency = bound(chain(4, 8, 12))
    residency.relearn()
    residency.apply([told([1, 2, 3]), stored([1, 2], medium="cpu")])
    assert residency.apply([Cleared()]) == [
        Resident("k4", 4, 4, "cpu", 1),
        Resident("k8", 8, 4, "cpu", 2),
        Evicted("tip"),
    ]
    assert not residency.is_relearning
    assert residency.apply([Cleared("storage")]) == []
    assert brief(residency.apply([told([1, 2, 3])])) == ["+k4@1", "+k8@2", "+tip@3"]
    assert residency.apply([Cleared("cpu")]) == []
    assert residency.apply([Cleared()]) == [Reset()]


def test_what_the_cpu_holds_is_believed_for_an_hour_unless_somebody_says_what_is_gone() -> None:
    residency = bound(chain(4, 8))
    copied = stored([1, 2], medium="cpu", group=None)
    residency.apply([told([1, 2]), copied, removed(2, 1)], now_s=10_000)
    residency.apply([told([1], session=None), removed(1)], now_s=13_000)  # it was loaded
    assert held(residency) == {"k4": 1, "tip": 2}
    assert residency.apply([], now_s=13_599) == []
    assert residency.apply([], now_s=13_601) == [Evicted("tip")]
    assert residency.apply([], now_s=16_601) == [Evicted("k4")]
    residency.apply([copied], now_s=20_000)
    residency.apply([removed(7, medium="cpu")], now_s=20_001)
    assert residency.apply([], now_s=90_000) == []
    assert held(residency) == {"k4": 1, "tip": 2}


def test_a_prefix_that_the_engine_does_not_serve_counts_again_when_events_name_it() -> None:
    residency = bound(chain(4, 8, 12))
    residency.apply([told([1, 2, 3])])
    assert residency.void(["k8", "tip", "unheard"]) == [Evicted("k8"), Evicted("tip")]
    assert held(residency) == {"k4": 1}
    assert brief(residency.apply([told([1, 2, 3])])) == ["+k8@2", "+tip@3"]


@pytest.mark.parametrize(
    ("version", "mode"),
    [((), UNCONFIRMED), ((0, 29), UNCONFIRMED), ((0, 30), SESSION), ((1, 0), SESSION)],
)
def test_an_engine_that_may_name_no_sessions_is_not_believed(version: tuple[int, ...], mode: str) -> None:
    residency = Residency()
    residency.expect(4, 0, version)
    assert mode_of(residency) == mode
    residency.apply([told([1, 2], session=None)])
    assert mode_of(residency) == mode
    residency.apply([told([3], 2)])
    assert mode_of(residency) == SESSION


@pytest.mark.parametrize(
    ("kinds", "mode"),
    [
        ([True], SESSION),
        ([True, False], PARTIAL),
        ([False, True], PARTIAL),
        ([True, True], PARTIAL),  # a prefix needs the blocks of both groups, and only one is watched
        ([False], UNCONFIRMED),
        ([False, False], UNCONFIRMED),
    ],
)
def test_what_events_can_tell_follows_from_the_engines_groups(kinds: list[bool], mode: str) -> None:
    residency = bound(chain(4, 8))
    residency.apply([told([1, 2], group=group, is_prefix=is_prefix) for group, is_prefix in enumerate(kinds)])
    assert mode_of(residency) == mode
    if mode != UNCONFIRMED:
        first = kinds.index(True)
        assert held(residency) == {"k4": 1, "tip": 2}
        assert residency.apply([removed(2, group=group) for group in range(len(kinds)) if group != first]) == []
        assert residency.apply([removed(2, group=first)]) == [Evicted("tip")]
