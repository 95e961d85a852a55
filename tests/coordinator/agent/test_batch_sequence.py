"""The order of an engine's batches, one rule per test."""

from __future__ import annotations

import pytest

from coordinator.agent.batch_sequence import BatchSequence, Item, Lost, Received, Restarted
from coordinator.agent.kv_events import Batch


def batch(ts: float) -> Batch:
    return Batch(ts, [])


def received(seq: int, ts: float) -> Received:
    return Received(seq, batch(ts))


def replay(sequence: BatchSequence, *replies: tuple[int, float], complete: bool = True) -> list[Item]:
    """The items that a whole replay produces; `replies` are (seq, ts)."""
    sequence.ask()
    items = [item for seq, ts in replies for item in sequence.replayed(seq, batch(ts))]
    return [*items, *sequence.ended(complete=complete)]


def begun(upto_seq: int) -> BatchSequence:
    """A sequence that has all batches up to `upto_seq`. The time of batch n is 100 + n."""
    sequence = BatchSequence()
    replay(sequence, *((seq, 100.0 + seq) for seq in range(upto_seq)))
    assert sequence.expected == upto_seq
    assert not sequence.asking
    return sequence


def test_a_replay_is_asked_for_at_once_and_from_the_batch_before() -> None:
    assert BatchSequence().asking
    assert BatchSequence().ask() == 0
    assert begun(upto_seq=7).ask() == 6


def test_the_next_batch_is_delivered_even_while_a_replay_is_under_way() -> None:
    sequence = BatchSequence()
    sequence.ask()
    assert sequence.live(0, batch(1), reconnected=False) == [received(0, 1)]
    assert sequence.replayed(0, batch(1)) == []
    assert sequence.replayed(1, batch(2)) == [received(1, 2)]


def test_a_batch_beyond_the_next_waits_for_a_replay() -> None:
    sequence = begun(upto_seq=2)
    assert sequence.live(4, batch(104), reconnected=False) == []
    assert sequence.holding
    assert sequence.asking
    assert sequence.ask() == 1
    assert replay(sequence, (1, 101), (2, 102), (3, 103), (4, 104)) == [received(n, 100 + n) for n in (2, 3, 4)]
    assert not sequence.holding


def test_a_batch_beyond_the_next_does_not_break_off_a_replay_under_way() -> None:
    sequence = BatchSequence()
    sequence.ask()
    sequence.live(3, batch(103), reconnected=False)
    assert not sequence.asking


def test_a_replay_asked_before_the_gap_was_seen_says_nothing_of_the_gap() -> None:
    sequence = begun(upto_seq=2)
    sequence.ask()
    sequence.live(4, batch(104), reconnected=False)
    assert sequence.replayed(1, batch(101)) == []
    assert sequence.ended(complete=True) == []
    assert sequence.asking
    assert replay(sequence, (1, 101), (4, 104)) == [Lost(2, 4), received(4, 104)]


def test_what_a_replay_that_was_given_up_did_not_bring_is_lost() -> None:
    sequence = begun(upto_seq=2)
    sequence.live(4, batch(104), reconnected=False)
    assert replay(sequence, complete=False) == [Lost(2, 4), received(4, 104)]


def test_a_replay_that_was_given_up_is_asked_on_for_as_long_as_it_brings_something() -> None:
    sequence = begun(upto_seq=2)
    sequence.live(6, batch(106), reconnected=False)
    assert replay(sequence, (1, 101), (2, 102), complete=False) == [received(2, 102)]
    assert sequence.asking
    assert replay(sequence, (2, 102), complete=False) == [Lost(3, 6), received(6, 106)]


def test_a_replay_that_was_given_up_is_asked_on_for_though_nothing_waits_for_it() -> None:
    sequence = begun(upto_seq=2)
    assert replay(sequence, (1, 101), (2, 102), complete=False) == [received(2, 102)]
    assert sequence.asking
    assert replay(sequence, complete=False) == []
    assert not sequence.asking


def test_a_hole_in_the_middle_of_a_replay_breaks_it_off_and_a_hole_at_its_beginning_is_lost() -> None:
    sequence = begun(upto_seq=2)
    sequence.ask()
    for seq in (1, 2):
        sequence.replayed(seq, batch(100.0 + seq))
    assert sequence.replayed(5, batch(105)) == []
    assert sequence.asking
    assert sequence.ask() == 2
    assert replay(sequence, (2, 102), (5, 105)) == [Lost(3, 5), received(5, 105)]


def test_a_batch_had_before_is_dropped_and_one_published_later_is_another_engines() -> None:
    sequence = begun(upto_seq=5)
    assert sequence.live(1, batch(101), reconnected=False) == []
    assert sequence.live(1, batch(200), reconnected=False) == [Restarted()]
    assert sequence.ask() == 0
    assert replay(sequence, (0, 199), (1, 200)) == [received(0, 199), received(1, 200)]


def test_the_next_batch_from_before_the_last_one_is_delivered_if_the_engine_knows_it() -> None:
    sequence = begun(upto_seq=2)
    assert sequence.live(2, batch(50), reconnected=False) == []
    assert replay(sequence, (1, 101)) == []
    assert sequence.live(2, batch(50), reconnected=False) == []
    assert replay(sequence, (1, 101), (2, 50)) == [received(2, 50)]
    assert sequence.live(3, batch(51), reconnected=False) == [received(3, 51)]


def test_a_clock_set_back_makes_no_restart_of_a_batch_that_comes_again() -> None:
    sequence = begun(upto_seq=2)
    sequence.live(2, batch(50), reconnected=False)
    replay(sequence, (1, 101), (2, 50))
    assert sequence.live(1, batch(101), reconnected=False) == []


def test_an_engine_that_has_nothing_of_what_was_had_began_again() -> None:
    sequence = begun(upto_seq=5)
    assert replay(sequence) == [Restarted()]
    assert replay(sequence) == []
    assert sequence.live(0, batch(1), reconnected=False) == [received(0, 1)]


def test_an_engine_whose_last_common_batch_differs_began_again() -> None:
    sequence = begun(upto_seq=5)
    sequence.ask()
    assert sequence.replayed(4, batch(204)) == [Restarted()]
    assert replay(sequence, (2, 202), (3, 203)) == [Lost(0, 2), received(2, 202), received(3, 203)]


def test_a_replay_that_differs_from_what_came_live_meanwhile_is_another_engines() -> None:
    sequence = begun(upto_seq=5)
    sequence.ask()
    sequence.live(5, batch(105), reconnected=False)
    sequence.live(6, batch(106), reconnected=False)
    assert sequence.replayed(4, batch(104)) == []
    assert sequence.replayed(6, batch(206)) == [Restarted()]


@pytest.mark.parametrize("seq", [2, 4, 5, 7])
def test_a_batch_over_a_new_connection_waits_for_the_engine_to_be_known_again(seq: int) -> None:
    sequence = begun(upto_seq=5)
    assert sequence.live(seq, batch(300), reconnected=True) == []
    sequence.ask()
    assert sequence.replayed(4, batch(299)) == [Restarted()]
    assert not sequence.holding  # the batch is in the new engine's ring, or belonged to the old engine


def test_a_batch_over_a_new_connection_to_the_same_engine_is_treated_as_any() -> None:
    sequence = begun(upto_seq=5)
    sequence.live(2, batch(102), reconnected=True)
    assert replay(sequence, (4, 104)) == []
    sequence.live(5, batch(105), reconnected=True)
    assert replay(sequence, (4, 104), (5, 105)) == [received(5, 105)]


def test_without_a_replay_a_lower_number_over_a_new_connection_is_another_engines() -> None:
    sequence = begun(upto_seq=5)
    sequence.live(2, batch(50), reconnected=True)
    assert replay(sequence, complete=False) == [Restarted()]
    assert replay(sequence, complete=False) == [Lost(0, 2), received(2, 50)]


def test_a_batch_that_does_not_decode_is_lost_alone() -> None:
    sequence = begun(upto_seq=2)
    assert sequence.live(2, None, reconnected=False) == [Lost(2, 3)]
    sequence.ask()
    assert sequence.replayed(2, None) == []
    assert sequence.replayed(3, None) == [Lost(3, 4)]
    assert sequence.ended(complete=True) == []
    assert sequence.live(4, batch(104), reconnected=False) == [received(4, 104)]


def test_what_waits_beyond_all_an_engine_has_is_delivered_in_the_end() -> None:
    sequence = begun(upto_seq=2)
    sequence.live(9, batch(109), reconnected=False)
    assert replay(sequence, (1, 101)) == [Lost(2, 9), received(9, 109)]
