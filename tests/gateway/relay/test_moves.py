"""Attempts on a replica that moved, over real HTTP and a real Redis; and replicas that died alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

from coordinator.registry import ASLEEP, ReplicaRecord
from coordinator.store import Store, StoreOptions
from gateway.deadlines import Deadlines
from gateway.relay.moves import DEATH_WINDOW_S, Moves, PoolDeaths, WaitingAttempt
from gateway.replicas.fleet import Fleet
from gateway.replicas.hangs import AnswerProgress, HangDetector
from gateway.replicas.health_checks import FAILURES, HealthChecks
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.settings.limit_settings import HealthSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis
from tests.web_server import serving

HEALTH = HealthSettings(timeout_s=0.2)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


class Replica:
    """A replica that answers while it is not frozen."""

    def __init__(self) -> None:
        self.asked_frozen = 0
        self.is_frozen = False
        self.application = web.Application()
        self.application.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models)])

    async def _health(self, _request: web.Request) -> web.Response:
        if self.is_frozen:
            self.asked_frozen += 1
            await asyncio.get_running_loop().create_future()
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def test_what_waits_at_an_address_that_the_replica_has_left_stays_while_that_answers_and_goes_when_it_does_not(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.replicas.health_checks.INTERVAL_S", 0.05)
    old, other, tasks, upstream = Replica(), Replica(), Tasks(), Upstream(300, None)
    async with serving(old.application) as old_url, serving(other.application) as other_url:
        store = Store(StoreOptions(redis_server.url, 0.02), "g0")
        tasks.spawn(store.run(), "store")
        await store.first_attempt()
        stays = ReplicaSettings(id="r1", url=other_url)
        fleet = Fleet([ReplicaSettings(id="r0", url=old_url), stays], store, upstream)
        checks, progress = HealthChecks(fleet, HEALTH, store, upstream), AnswerProgress(fleet, store)
        moves = Moves(fleet, checks, store, progress, HangDetector(fleet, HEALTH, store, upstream, progress))
        try:
            tasks.spawn(checks.run(), "checks")
            await checks.first_round()
            tasks.spawn(moves.run(), "moves")
            await eventually(lambda: fleet.is_ready("r0") and fleet.is_ready("r1"))
            waiting = tasks.spawn(wait_for_r0(moves), "a request")
            begun = tasks.spawn(wait_for_r0(moves, can_go_on=lambda: True), "a stream")
            await eventually(lambda: len(moves.waiting.get("r0", ())) == 2)
            member = fleet.members["r0"]
            fleet.set_targets([ReplicaSettings(id="r0", url="http://127.0.0.1:1"), stays])
            before_s = member.answered_s
            await eventually(lambda: member.answered_s > before_s)
            assert not waiting.done()
            old.is_frozen = True
            assert (await waiting).move_reason == "dead"
            [stream] = moves.waiting["r0"]
            assert (begun.done(), stream.is_scheduled) == (False, False)
            assert old.asked_frozen >= FAILURES
            assert store.pool_names() == ["m"]
        finally:
            await tasks.close()
            await upstream.close()


async def wait_for_r0(moves: Moves, can_go_on: Callable[[], bool] | None = None) -> WaitingAttempt:
    task = asyncio.current_task()
    assert task is not None
    limit = Deadlines().within(None, task)
    try:
        with limit, moves.attempt("r0", ("r0", "r1"), [], limit, can_go_on=can_go_on) as waiting:
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        return waiting
    raise AssertionError("nothing answers it")


SENT_S = 100.0


@pytest.mark.parametrize(
    ("answered_s", "is_silent", "state", "other_bytes", "is_blamed"),
    [
        (SENT_S - 0.5, True, "dead", 10, True),
        (SENT_S + 0.5, True, "ready", 10, True),  # a check that was on its way
        (SENT_S + 5, True, "dead", 10, False),  # it answered while it had the request
        (SENT_S - 0.5, False, "dead", 10, False),  # its connection was refused
        (SENT_S - 0.5, True, "dead", 1000, False),  # a longer one waits there
        (SENT_S + 5, False, "hung", 10, True),
    ],
)
async def test_a_request_is_blamed_for_silence_that_begins_with_it_if_no_longer_one_waits(
    answered_s: float, is_silent: bool, state: str, other_bytes: int, is_blamed: bool
) -> None:
    store, upstream = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0"), Upstream(300, None)
    fleet = Fleet([ReplicaSettings(id="r0", url="http://127.0.0.1:1")], store, upstream)
    checks, progress = HealthChecks(fleet, HEALTH, store, upstream), AnswerProgress(fleet, store)
    moves = Moves(fleet, checks, store, progress, HangDetector(fleet, HEALTH, store, upstream, progress))
    member, task = fleet.members["r0"], asyncio.current_task()
    assert task is not None
    member.answered_s, member.is_silent = answered_s, is_silent
    limit = Deadlines().within(None, task)
    with (
        moves.attempt("r0", (), [], limit, size_bytes=100) as waiting,
        moves.attempt("r0", (), [], limit, size_bytes=other_bytes),
        moves.attempt("r0", (), [], limit, size_bytes=10_000, can_go_on=bool),
    ):
        waiting.since_s = SENT_S
        record = ReplicaRecord("r0", "life-1", state, 0, 1, member.url)
        assert moves._is_stall(waiting, member, record) is is_blamed


async def test_a_pause_moves_what_waits_and_leaves_streams_that_have_begun_to_their_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, upstream = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0"), Upstream(300, None)
    fleet = Fleet([ReplicaSettings(id="r0", url="http://127.0.0.1:1")], store, upstream)
    checks, progress = HealthChecks(fleet, HEALTH, store, upstream), AnswerProgress(fleet, store)
    moves = Moves(fleet, checks, store, progress, HangDetector(fleet, HEALTH, store, upstream, progress))
    record = ReplicaRecord("r0", "life-1", ASLEEP, 0, 1, "http://127.0.0.1:1")
    monkeypatch.setattr(moves, "_member_and_record", lambda _: (fleet.members["r0"], record))
    moved: list[str] = []
    monkeypatch.setattr(WaitingAttempt, "move", lambda each, reason: moved.append(f"{reason} {each.has_begun}"))
    task = asyncio.current_task()
    assert task is not None
    limit = Deadlines().within(None, task)
    with moves.attempt("r0", (), [], limit), moves.attempt("r0", (), [], limit, can_go_on=bool):
        moves._check_replica("r0", SENT_S)
    assert moved == ["asleep False"]


@pytest.mark.parametrize("is_prefilling", [True, False])
async def test_a_replica_does_not_hang_while_all_that_waits_there_is_computed_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_prefilling: bool
) -> None:
    store, upstream = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0"), Upstream(300, None)
    fleet = Fleet([ReplicaSettings(id="r0", url="http://127.0.0.1:1")], store, upstream)
    checks, progress = HealthChecks(fleet, HEALTH, store, upstream), AnswerProgress(fleet, store)
    hangs = HangDetector(fleet, HEALTH, store, upstream, progress)
    moves, checked = Moves(fleet, checks, store, progress, hangs), list[str]()
    member, task = fleet.members["r0"], asyncio.current_task()
    assert task is not None
    member.is_answering = member.alive = True
    record = ReplicaRecord("r0", "life-1", "ready", 0, 1, member.url)
    monkeypatch.setattr(moves, "_member_and_record", lambda _: (member, record))
    monkeypatch.setattr(checks, "check_silent", lambda _: None)
    monkeypatch.setattr(hangs, "check", lambda each, _: checked.append(each.id))
    limit = Deadlines().within(None, task)
    with moves.attempt("r0", (), [], limit) as waiting:
        waiting.since_s = 0.0
        if is_prefilling:
            waiting.waits_for_prefill()
        moves._check_replica("r0", SENT_S)
        waiting.is_prefilled()
        moves._check_replica("r0", SENT_S)
    assert checked == ["r0"] * (1 if is_prefilling else 2)


@pytest.mark.parametrize("can_go_on", [True, False])
async def test_a_stream_that_cannot_go_on_elsewhere_waits_for_its_replica_and_is_read_once(
    monkeypatch: pytest.MonkeyPatch, can_go_on: bool
) -> None:
    store, upstream = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0"), Upstream(300, None)
    fleet = Fleet([ReplicaSettings(id="r0", url="http://127.0.0.1:1")], store, upstream)
    checks, progress = HealthChecks(fleet, HEALTH, store, upstream), AnswerProgress(fleet, store)
    moves = Moves(fleet, checks, store, progress, HangDetector(fleet, HEALTH, store, upstream, progress))
    monkeypatch.setattr(moves, "_move_reason", lambda _: "dead")
    task, moved = asyncio.current_task(), list[str]()
    assert task is not None
    monkeypatch.setattr(WaitingAttempt, "move", lambda _, reason: moved.append(reason))
    limit = Deadlines().within(None, task)
    with moves.attempt("r0", (), [], limit, can_go_on=lambda: can_go_on) as waiting:
        waiting.is_scheduled = True
        moves._move_if_still_gone(waiting)
    assert moved == (["dead"] if can_go_on else [])
    assert waiting.is_scheduled is not can_go_on


def observed(count: int, *moments: tuple[float, tuple[int, ...]]) -> frozenset[str]:
    """Those that died alone. All replicas are ready at first. Each later moment names the dead replicas."""
    deaths = PoolDeaths()
    for at_s, dead in ((0, ()), *moments):
        deaths.observe({f"r{index}": "dead" if index in dead else "ready" for index in range(count)}, at_s)
    return deaths.died_alone


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_one_of_any_number_dies_alone(count: int) -> None:
    assert observed(count, (5, (0,))) == {"r0"}


def test_up_to_a_third_of_a_pool_dies_alone_and_more_does_not() -> None:
    assert observed(9, (1, (0,)), (2, (0, 1)), (3, (0, 1, 2))) == {"r0", "r1", "r2"}
    assert observed(9, (1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (0, 1, 2, 3))) == frozenset()
    assert observed(3, (1, (0,)), (1 + DEATH_WINDOW_S, (0, 1))) == {"r0", "r1"}, "these lie further apart"


def test_who_died_with_others_does_not_die_alone_later_by_lying_there() -> None:
    together = ((1, (0, 1)), (1 + 2 * DEATH_WINDOW_S, (0, 1)))
    assert observed(3, *together) == frozenset()
    assert observed(3, *together, (100, (1,)), (101, (0, 1))) == {"r0"}


def test_a_replica_that_hangs_is_dead_and_one_that_was_never_ready_or_was_forgotten_is_not() -> None:
    deaths = PoolDeaths()
    deaths.observe({"r0": "dead", "r1": "ready"}, 0)
    deaths.observe({"r0": "dead", "r1": "hung"}, 1)
    assert deaths.died_alone == {"r1"}
    deaths.observe({"r0": "dead"}, 2)
    assert deaths.died_alone == frozenset()
