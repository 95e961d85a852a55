"""Judges the failed attempts of one request: whose fault they are, and whether the request was executed. Pure.

A prompt can make an engine fail, and then it fails every engine in the same way. A client that sends such prompts must
not open the breakers of all replicas. So a status of 500 or more counts against a replica only if another replica
answered the same request in another way. A failed connection always counts against the replica.

A request with effects beyond its answer must not be executed twice. So another replica gets it only if the first one
certainly has not executed it: it refused the connection, or it answered that it takes no requests. A broken connection
proves nothing, because the replica may have read the request before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from coordinator.registry import ASLEEP
from gateway.errors import ApiError
from gateway.relay.endings import ABORTED
from gateway.relay.own_refusals import REFUSALS

RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_UNAVAILABLE = 503
DRAINED = "drained"
"""Of an attempt whose replica is being emptied."""
HEDGED = "hedged"
"""Of an attempt beside which a second one began first."""
SWITCHED = "switched"
"""Of an attempt that its replica, or that of its prefill, refused because its role has changed."""
NO_PREFILL = "no_prefill"
"""Of an attempt that was not sent: nobody has computed its prompt, and its replica does not."""
UNPREFILLED = "unprefilled"
"""Of an attempt that waits in vain for what another replica was to compute for it at the same time."""
_BROKEN = frozenset({500, 502})
_NOT_EXECUTED = frozenset({"refused", "status_404", "status_429", "status_503", SWITCHED, NO_PREFILL})
_PAUSED = b"Generation is paused"
"""vLLM's words to requests that come while it is paused. They have no code of their own."""
_MAX_ERROR_BYTES = 16 * 1024
"""Real error bodies are smaller. Of a larger one, only the status is compared."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed before its first byte. `status` is 0 if the replica gave no answer."""

    reason: str
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes | None = b""
    """None if it was too large to keep."""
    is_stall: bool = False
    """Whether the replica fell silent as soon as the request came: see moves.py."""
    is_of_prefill: bool = False
    """Whether the replica may only have failed to get what another one has computed for it."""

    @property
    def is_server_error(self) -> bool:
        """Whether the replica answered that it failed. (429 says that it is overloaded.)"""
        return self.status >= 500 and not self.is_of_prefill

    @property
    def is_pause(self) -> bool:
        """Whether the engine answered that it is paused, or that it was told to abort. Then it is well."""
        return self.reason == ABORTED or (self.status == _UNAVAILABLE and _PAUSED in (self.body or b""))

    @property
    def is_silence(self) -> bool:
        """Whether the replica gave no answer although it was in use."""
        return not self.status and self.reason not in ("unreachable", "dead", ASLEEP, DRAINED, SWITCHED, NO_PREFILL)

    @property
    def is_error(self) -> bool:
        """Whether the replica answered that it is broken, or broke the connection. A 503, a 504 and a timeout may only
        say that it is busy."""
        if self.is_of_prefill:
            return False
        return self.status in _BROKEN if self.status else self.is_silence and self.reason != "timeout"


def is_refusal(failure: Failure) -> bool:
    """Whether the replica refused what another one may serve: see own_refusals.py."""
    return failure.status in REFUSALS


def ends_attempts(failures: Sequence[Failure], has_effects: bool = False) -> bool:
    """Whether to ask no other replica. There are three reasons: the request `has_effects` and may have been executed;
    it has stalled two replicas; or the last failure repeats an earlier one, so that a third replica would fail in the
    same way. A repeated 503 is no such reason: it says that a server cannot serve now, and two servers may be stopping
    at the same time."""
    last = failures[-1]
    if has_stalled_two(failures):
        return True
    if has_effects and last.reason not in _NOT_EXECUTED:
        return True
    return last.is_server_error and last.status != _UNAVAILABLE and _said(last) in map(_said, failures[:-1])


def has_stalled_two(failures: Sequence[Failure]) -> bool:
    return sum(failure.is_stall for failure in failures) > 1


def prompt_stalls_replicas() -> ApiError:
    message = (
        "Two replicas stopped answering, each as soon as it had this request, so it was not sent to a third one. "
        "A very long prompt, or large images, can keep a server busy for seconds. Make the prompt shorter."
    )
    # SDKs send a request again after a 503 unless this header forbids it.
    return ApiError(503, "prompt_stalls_replicas", message, headers={"x-should-retry": "false"})


def maybe_executed(failures: Sequence[Failure]) -> ApiError | None:
    """The error for a request with effects whose fate is not known: its replica gave no answer, or none that can be
    passed on. None if it is known."""
    if not failures:
        return None
    last = failures[-1]
    if last.reason in _NOT_EXECUTED or (last.status and last.body is not None):
        return None
    message = (
        f"The replica gave no usable answer ({last.reason}) and may have executed this request. It was not sent "
        "to another one, because it has effects beyond its answer. Find out what became of it before you send it again."
    )
    # OpenAI's and Anthropic's SDKs send a request again after a 502 unless this header forbids it.
    return ApiError(502, "maybe_executed", message, headers={"x-should-retry": "false"})


def held_against_replicas(failures: Sequence[Failure], was_answered: bool) -> list[int]:
    """The indexes of the server errors that count against their replicas. Call it after the last attempt.

    If a replica answered, all of them count. Otherwise those count that no other replica repeated. Pauses never count.
    """
    said = [_said(failure) for failure in failures]
    return [
        index
        for index, failure in enumerate(failures)
        if failure.is_server_error and not failure.is_pause and (was_answered or said.count(said[index]) == 1)
    ]


def _said(failure: Failure) -> tuple[int, str]:
    """The part of an answer that can be compared with that of another replica: its status and error code."""
    return failure.status, error_code(failure.body)


def error_code(body: bytes | None) -> str:
    """The `code` and `type` in an error's body; empty if there are none. It may have OpenAI's shape, Anthropic's, or
    that of older vLLM, where they are at the top."""
    if body is None or len(body) > _MAX_ERROR_BYTES:
        return ""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    error = document.get("error", document) if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return ""
    return " ".join(str(error[name]) for name in ("code", "type") if isinstance(error.get(name), str | int))
