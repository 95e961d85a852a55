"""What the failed attempts of one request mean: the request's own fault, or the replicas'; executed, or not. Pure.

A prompt can make an engine fail, and it fails every engine in the same way. Who sends such prompts must not open the
breakers of all replicas for everyone. So a status of 500 and more is held against a replica only where another one did
otherwise with the same request. A connection that fails is the replica's fault in any case.

A request that does more than compute its answer must not be executed twice. So it is sent elsewhere only where the
replica has not executed it for certain: it refused to connect, or it answered that it takes no requests. A connection
that was kept and breaks proves nothing: whether the replica closed it before it read the request, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from gateway.errors import ApiError

RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_UNAVAILABLE = 503
_NOT_EXECUTED = frozenset({"refused", "status_429", "status_503"})
_MAX_ERROR_BYTES = 16 * 1024
"""No error body is so large; of a larger one, only the status is looked at."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed before its first byte; `status` 0: the replica gave no answer."""

    reason: str
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes | None = b""
    """None: more than is kept."""

    @property
    def is_server_error(self) -> bool:
        """Whether the replica answered that it failed (429: that it has too much to do)."""
        return self.status >= 500


def ends_attempts(failures: Sequence[Failure], has_effects: bool = False) -> bool:
    """Whether no other replica shall be asked. Either the request may have been executed and `has_effects` beyond its
    answer. Or the last failure repeats an earlier one, so that a third replica would fail in the same way. Not a 503:
    it says that a server cannot serve now, whatever the request is. Two of several may be stopping at once."""
    last = failures[-1]
    if has_effects and last.reason not in _NOT_EXECUTED:
        return True
    return last.is_server_error and last.status != _UNAVAILABLE and _said(last) in map(_said, failures[:-1])


def maybe_executed(failures: Sequence[Failure]) -> ApiError | None:
    """The error for a request with effects of which nobody can say what became of it: the replica that it was sent to
    gave no answer, or none that can be passed on. None where that is known."""
    if not failures:
        return None
    last = failures[-1]
    if last.reason in _NOT_EXECUTED or (last.status and last.body is not None):
        return None
    message = (
        f"The replica gave no usable answer ({last.reason}) and may have executed this request. It was not sent "
        "to another one, because it has effects beyond its answer. Find out what became of it before you send it again."
    )
    # OpenAI's and Anthropic's SDKs send a request again after a 502, unless they are told not to.
    return ApiError(502, "maybe_executed", message, headers={"x-should-retry": "false"})


def held_against_replicas(failures: Sequence[Failure], was_answered: bool) -> list[int]:
    """Which server errors, by index, count against their replicas, now that the request's last attempt is over.

    All of them where another replica has answered; else those that no other replica has repeated.
    """
    said = [_said(failure) for failure in failures]
    return [
        index
        for index, failure in enumerate(failures)
        if failure.is_server_error and (was_answered or said.count(said[index]) == 1)
    ]


def _said(failure: Failure) -> tuple[int, str]:
    """What a replica answered, as far as another one's answer can be compared with it: status, and error code."""
    return failure.status, error_code(failure.body)


def error_code(body: bytes | None) -> str:
    """The `code` and `type` in an error's body, in OpenAI's shape, in Anthropic's, or in that of older vLLM, which has
    them at the top; empty where there are none."""
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
