"""The delay that an agent reports."""

from __future__ import annotations

from coordinator.agent.event_delay import EventDelay


def test_the_slowest_event_is_told_for_as_long_as_somebody_who_asks_each_15_s_may_miss_it() -> None:
    delay = EventDelay()
    delay.note(0.02, 3, 100.0)
    delay.note(0.5, 2, 101.0)
    delay.note(0.03, 1, 102.0)
    assert delay.figures(103.0) == {"event_delay_s": 0.5, "key_transitions": 6}
    delay.note(0.04, 1, 118.0)
    assert delay.figures(129.0)["event_delay_s"] == 0.5
    assert delay.figures(134.0)["event_delay_s"] == 0.04
    assert delay.figures(200.0) == {"event_delay_s": 0.0, "key_transitions": 7}


def test_what_is_not_said_again_yet_is_late() -> None:
    delay = EventDelay()
    delay.note(0.02, 3, 100.0)
    assert delay.figures(101.0, untold_s=7.0)["event_delay_s"] == 7.0
