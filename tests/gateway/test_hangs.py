"""For how long a replica has shown nothing new."""

from __future__ import annotations

from gateway.hangs import StandStill


def test_a_stand_still_lasts_from_the_first_look_at_what_it_shows() -> None:
    look = StandStill()
    assert [look.lasts_s(("a", 1), at_s) for at_s in (5.0, 6.0, 9.5)] == [0, 1, 4.5]
    assert not look.has_changed


def test_whatever_changes_ends_it() -> None:
    look = StandStill()
    look.lasts_s((1, b"gw0 1", 7, (0.5, None)), 5)
    for at_s, shown in (
        (6, (2, b"gw0 1", 7, (0.5, None))),
        (7, (2, b"gw1 1", 7, (0.5, None))),
        (8, (2, b"gw1 1", 7, (0.5, 3.0))),
    ):
        assert look.lasts_s(shown, at_s) == 0
        assert look.has_changed
    assert look.lasts_s((2, b"gw1 1", 7, (0.5, 3.0)), 10) == 2
