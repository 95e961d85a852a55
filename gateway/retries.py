"""What the failed attempts of one request mean: the request's own fault, or the replicas'. Pure.

A prompt can make an engine fail, and it fails every engine in the same way. Who sends such prompts must not open the
breakers of all replicas for everyone. So a status of 500 and more is held against a replica only where another one did
otherwise with the same request. A connection that fails is the replica's fault in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
_UNAVAILABLE = 503
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


def ends_attempts(failures: Sequence[Failure]) -> bool:
    """Whether the last failure repeats an earlier one, so that a third replica would fail in the same way. Not a 503:
    it says that a server cannot serve now, whatever the request is. Two of several may be stopping at once."""
    last = failures[-1]
    return last.is_server_error and last.status != _UNAVAILABLE and _said(last) in map(_said, failures[:-1])


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
