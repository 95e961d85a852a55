"""How long a replica has made no progress, and which of an engine's figures show work."""

from __future__ import annotations

import pytest

from coordinator.store import Store, StoreOptions
from gateway.replicas.fleet import Fleet
from gateway.replicas.hangs import AnswerProgress, HangDetector, StallTimer
from gateway.replicas.member import Member
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.settings.limit_settings import HealthSettings
from gateway.upstream import Upstream
from tests.gateway.upstream.conftest import RawReplica

PATIENCE_S = 5.0
FIGURES = {"prefix_queries_tokens": 10.0, "generated_tokens": 3.0, "kv_usage": 0.5}


def a_timer(**figures: float) -> StallTimer:
    return StallTimer("life-1", "ready", figures)


def test_a_stand_still_lasts_from_the_first_look_at_what_it_shows() -> None:
    timer = a_timer()
    assert [timer.stalled_s(("a", 1), at_s, PATIENCE_S) for at_s in (5.0, 6.0, 9.5)] == [0, 1, 4.5]
    assert not timer.has_progressed


def test_whatever_changes_ends_it() -> None:
    timer = a_timer()
    timer.stalled_s((1, b"gw0 1", (7,)), 5, PATIENCE_S)
    for at_s, shown in ((6, (2, b"gw0 1", (7,))), (7, (2, b"gw1 1", (7,))), (8, (2, b"gw1 1", (8,)))):
        assert timer.stalled_s(shown, at_s, PATIENCE_S) == 0
        assert timer.has_progressed
    assert timer.stalled_s((2, b"gw1 1", (8,)), 10, PATIENCE_S) == 2


def test_only_what_another_gateway_got_since_the_last_look_is_an_answer_to_others() -> None:
    timer = a_timer()
    for at_s, shared in ((5, b"gw1 7"), (6, b"gw1 7"), (7, b"gw0 8"), (8, None)):
        timer.note_shared(shared, "gw0", at_s)
        assert timer.answered_others_s < 0
    timer.note_shared(b"gw1 9", "gw0", 9)
    timer.note_shared(b"gw1 10", "gw0", 10)
    assert timer.answered_others_s == 10


def test_time_in_which_nobody_looked_does_not_count_and_is_no_change() -> None:
    timer = a_timer()
    timer.stalled_s("same", 5, PATIENCE_S)
    assert timer.stalled_s("same", 11, PATIENCE_S) == 0
    assert not timer.has_progressed
    assert timer.stalled_s("same", 13, PATIENCE_S) == 2


@pytest.mark.parametrize(
    ("figures", "seq"),
    [
        ({}, 7),  # the replica did not answer
        (FIGURES, -1),  # no agent reports
        (FIGURES | {"kv_usage": 0.2}, 7),  # clients hung up
        (FIGURES | {"waiting": 9.0}, 7),
    ],
)
def test_silence_hang_ups_and_a_longer_queue_are_no_work(figures: dict[str, float], seq: int) -> None:
    timer = a_timer()
    before = timer.work_done(FIGURES, 7)
    assert timer.work_done(figures, seq) == before
    assert timer.work_done(FIGURES, 7) == before


@pytest.mark.parametrize(("figures", "seq"), [({"kv_usage": 0.6}, 7), ({"generated_tokens": 4.0}, 7), ({}, 8)])
def test_tokens_events_and_a_fuller_cache_are_work(figures: dict[str, float], seq: int) -> None:
    timer = a_timer()
    before = timer.work_done(FIGURES, 7)
    assert timer.work_done(FIGURES | figures, seq) != before


def test_an_engine_that_never_told_of_its_work_is_slow_for_all_that_is_known() -> None:
    assert a_timer().work_done({"waiting": 3.0}, 7) is None
    assert a_timer(**FIGURES).work_done({}, -1) is not None


async def test_an_address_that_is_known_from_the_store_alone_does_not_get_the_api_key() -> None:
    """Whoever can write to Redis can add a replica's record there."""
    raw, upstream = RawReplica(), Upstream(300, "secret")
    await raw.start()
    try:
        store = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "gw0")
        fleet = Fleet([ReplicaSettings(id="ours", url=raw.url)], store, upstream)
        fleet.members["theirs"] = Member("theirs", raw.url)
        hangs = HangDetector(fleet, HealthSettings(), store, upstream, AnswerProgress(fleet, store))
        for name in ("ours", "theirs"):
            await hangs._engine_figures(fleet.members[name])
        assert [b"secret" in head for head in raw.heads] == [True, False]
    finally:
        await raw.close()
        await upstream.close()
