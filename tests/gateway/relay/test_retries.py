"""Whether a request failed because of itself or because of its replicas."""

from __future__ import annotations

import orjson
import pytest

from gateway.relay.retries import Failure, ends_attempts, error_code, held_against_replicas, maybe_executed


def answer(status: int, code: str | int = "InternalServerError") -> Failure:
    body = orjson.dumps({"error": {"message": "no two are alike", "type": "server_error", "code": code}})
    return Failure(f"status_{status}", status, (), body)


BAD = answer(500)
OTHER = answer(500, "OutOfMemory")
BUSY = answer(429)
AWAY = answer(503)
SILENT = Failure("reset")


@pytest.mark.parametrize(
    ("failures", "ends"),
    [
        ([BAD], False),
        ([BAD, BAD], True),
        ([BAD, OTHER], False),
        ([BAD, answer(502)], False),
        ([BAD, SILENT], False),
        ([BAD, SILENT, BAD], True),
        ([BAD, BUSY, BAD], True),
        ([BUSY, BUSY], False),
        ([AWAY, AWAY], False),
        ([SILENT, SILENT], False),
    ],
)
def test_a_third_replica_is_not_asked_for_what_two_have_failed_at_alike(failures: list[Failure], ends: bool) -> None:
    assert ends_attempts(failures) == ends


@pytest.mark.parametrize(
    ("failures", "ends", "is_unsure"),
    [
        ([], None, False),
        ([Failure("refused")], False, False),
        ([BUSY], False, False),
        ([AWAY], False, False),
        ([BUSY, AWAY, Failure("refused")], False, False),
        ([BAD], True, False),
        ([answer(504)], True, False),
        ([Failure("status_500", 500, (), None)], True, True),
        ([Failure("error_event", 503)], True, False),
        ([SILENT], True, True),
        ([Failure("timeout")], True, True),
        ([Failure("what nobody thought of")], True, True),
        ([AWAY, SILENT], True, True),
    ],
)
def test_what_has_effects_is_sent_elsewhere_only_where_it_was_not_executed_for_certain(
    failures: list[Failure], ends: bool | None, is_unsure: bool
) -> None:
    assert ends is None or ends_attempts(failures, has_effects=True) == ends
    assert (maybe_executed(failures) is not None) == is_unsure


@pytest.mark.parametrize(
    ("failures", "held"),
    [
        ([BAD], [0]),
        ([BAD, BAD], []),
        ([BAD, OTHER], [0, 1]),
        ([BAD, SILENT], [0]),
        ([BAD, SILENT, BAD], []),
        ([AWAY, AWAY, AWAY], []),
        ([AWAY, BAD, AWAY], [1]),
        ([BUSY, SILENT], []),
    ],
)
def test_what_no_replica_answered_is_held_against_those_that_failed_alone(
    failures: list[Failure], held: list[int]
) -> None:
    assert held_against_replicas(failures, was_answered=False) == held


def test_what_a_replica_answered_is_held_against_all_that_failed_but_for_the_busy() -> None:
    assert held_against_replicas([AWAY, AWAY], was_answered=True) == [0, 1]
    assert held_against_replicas([BAD, BUSY, SILENT], was_answered=True) == [0]


def test_an_engine_that_pauses_or_aborts_does_what_it_was_told_to() -> None:
    paused = Failure("status_503", 503, (), b'{"error":{"message":"Generation is paused. Please retry."}}')
    assert held_against_replicas([paused, Failure("aborted", 503)], was_answered=True) == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "x", "type": "server_error", "param": null, "code": 500}}', "500 server_error"),
        (b'{"object": "error", "message": "x", "type": "InternalServerError", "code": 500}', "500 InternalServerError"),
        (b'{"type": "error", "error": {"type": "internal_error", "message": "x"}}', "internal_error"),
        (b'{"error": "it is a text"}', ""),
        (b'{"error": {"code": {"deep": 1}, "type": null}}', ""),
        (b'{"detail": "Internal Server Error"}', ""),
        (b"Internal Server Error", ""),
        (b"[1]", ""),
        (b"", ""),
        (b"\xff", ""),
        (b'{"error": {"code": 500, "message": "' + b"x" * 100_000 + b'"}}', ""),
    ],
)
def test_an_error_code_is_found_where_servers_write_one(body: bytes, code: str) -> None:
    assert error_code(body) == code
