"""Tells whether an engine finished an answer, by what the answer itself says. Pure.

An engine may stop in the middle of an answer, although its server ends the answer as if it were complete. It was told
to abort its requests (vLLM: /abort_requests, /pause, /sleep, SIGTERM), or it failed. vLLM 0.33 says so like this:

- a choice has the finish reason `abort` or `error`;
- a message of Anthropic's API has `"stop_reason": null` at its end;
- a response has the status `cancelled` or `failed`, or is `completed` although no token was generated. (A response that
  was aborted later cannot be told from a complete one.)
- an embedding is empty;
- an object `error` stands in a stream, or in an answer of status 200.

An unknown finish reason is an end: a new engine's `stop` by another name must not fail every answer.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from gateway.endpoints import Api
from gateway.upstream.excerpts import WINDOW_BYTES

ABORTED = "aborted"
_NO_ENDS = frozenset({"abort", "aborted", "error", "cancelled", "canceled", "failed", "interrupted", "timeout"})
"""Finish reasons of vLLM, SGLang, TensorRT-LLM and Dynamo, and other spellings of these."""
_NO_END = re.compile(rb'"finish_reason"\s{0,9}:\s{0,9}"(?:' + "|".join(sorted(_NO_ENDS)).encode() + rb')"')
FINISHES = (b'"finish_reason":"', b'"finish_reason": "')
"""How the finish reason of a choice begins, once it has one."""
_ERROR = (b'"error":{', b'"error": {', b'"error":"', b'"error": "')
_SIGNS: Final[dict[Api, tuple[bytes, ...]]] = {
    "openai": _ERROR,
    "openai-responses": (
        *_ERROR,
        *(
            b'"status":%b"%b"' % (space, each)
            for space in (b"", b" ")
            for each in (b"cancelled", b"failed", b"incomplete")
        ),
    ),
    "anthropic": (*_ERROR, b'"stop_reason":null', b'"stop_reason": null'),
}
"""What stands near the beginning or the end of an answer that its engine did not finish."""
_EMPTY_VECTORS = (b'"embedding":[]', b'"embedding":""', b'"embedding": []', b'"embedding": ""')
_LIMITS = ("max_output_tokens", "content_filter", None)
"""The reasons for which a response is incomplete, and ended by itself."""
_ENGINE = re.compile(r"server|internal|engine|unavailable|overload|timeout|api_?error", re.IGNORECASE)
_RATE_LIMIT = re.compile(r"rate_?limit", re.IGNORECASE)
_MAX_MESSAGE_CHARS = 300


class Unfinished(NamedTuple):
    """Why an answer is not complete, and the status that would have said so. `error` is the engine's own object."""

    reason: str
    status: int = 503
    error: dict[str, Any] | None = None

    @property
    def is_requests_fault(self) -> bool:
        """Whether the client can mend it. Then the engine has said all there is to say."""
        return 400 <= self.status < 500 and self.status != 429

    def __str__(self) -> str:
        message = self.error.get("message") if self.error is not None else "the engine aborted it"
        return f"{self.reason}: {str(message)[:_MAX_MESSAGE_CHARS]}"


ABORT = Unfinished(ABORTED)


def unfinished(document: dict[str, Any], may_be_cancelled: bool = False) -> Unfinished | None:
    """Why the engine did not finish the answer that this is, or that this event belongs to; None if it says nothing of
    the kind. `may_be_cancelled`: the client itself may cancel the response."""
    error, choices = document.get("error"), document.get("choices")
    if error is None and isinstance(choices, list):
        for choice in choices:
            if _is_no_end(choice, "finish_reason"):
                return ABORT
        return None
    kind = document.get("type")
    if error is None and "error" in (kind, document.get("object")):
        error = document
    if isinstance(error, str) and error:
        error = {"message": error}
    if isinstance(error, dict) and error:
        return Unfinished("error_event", _status(error), error)
    if kind == "message_delta":
        return ABORT if _has_no_stop(document.get("delta")) else None
    if kind == "message":
        return ABORT if _has_no_stop(document) else None
    if document.get("object") == "list":
        return ABORT if _lacks_vector(document.get("data")) else None
    response = document if document.get("object") == "response" else document.get("response")
    if isinstance(response, dict) and not (may_be_cancelled and kind == "response.cancelled"):
        return _of_response(response)
    return None


def may_be_unfinished(data: bytes, words: tuple[bytes, ...]) -> bool:
    """Whether an event in this data may say that its engine did not finish. Most events do not, so this is cheap.
    `words`: see `Endpoint.ending_words`; there are none if nothing is generated."""
    for word in words:
        if word in data:
            return True
    for reason in FINISHES if words else ():
        at = data.find(reason)
        while at >= 0:
            if _NO_END.match(data, at):
                return True
            at = data.find(reason, at + 1)
    return False


def whole_may_be_unfinished(data: bytes, api: Api) -> bool:
    """Whether a large answer may say that its engine did not finish it. Most do not, and are not parsed."""
    ends = data[:WINDOW_BYTES] + data[-WINDOW_BYTES:]
    return says_no_end(data) or any(sign in ends for sign in _SIGNS[api])


def says_no_end(data: bytes) -> bool:
    """Whether this piece of an unparsed answer has a finish reason that is no end, or an empty embedding. Text
    cannot imitate them: inside a string, quotation marks have a backslash."""
    if b'"finish_reason"' in data and _NO_END.search(data) is not None:
        return True
    return any(vector in data for vector in _EMPTY_VECTORS)


def may_open(event: bytes) -> bool:
    """Whether an event of a stream may only announce an answer. Most events do not, so this is cheap."""
    return b'"role"' in event or b"message_start" in event or b"ping" in event


def opens(document: dict[str, Any]) -> bool:
    """Whether an event of a stream only announces an answer. Nothing of it was generated yet."""
    choices = document.get("choices")
    if not choices or not isinstance(choices, list):
        return document.get("type") in ("message_start", "ping")
    return all(
        isinstance(each, dict)
        and each.get("finish_reason") is None
        and isinstance(delta := each.get("delta"), dict)
        and delta.get("role")
        and not any(value for name, value in delta.items() if name != "role")
        for each in choices
    )


def _is_no_end(part: Any, name: str) -> bool:
    reason = part.get(name) if isinstance(part, dict) else None
    return isinstance(reason, str) and reason in _NO_ENDS


def _has_no_stop(message: Any) -> bool:
    if not isinstance(message, dict) or "stop_reason" not in message:
        return False
    return message["stop_reason"] is None or _is_no_end(message, "stop_reason")


def _lacks_vector(data: Any) -> bool:
    return isinstance(data, list) and any(
        isinstance(each, dict) and each.get("object") == "embedding" and each.get("embedding") in ([], "")
        for each in data
    )


def _of_response(response: dict[str, Any]) -> Unfinished | None:
    status, error, usage = response.get("status"), response.get("error"), response.get("usage")
    if isinstance(error, dict) and error:
        return Unfinished("error_event", _status(error), error)
    if status == "completed":
        generated = usage.get("output_tokens") if isinstance(usage, dict) else None
        return ABORT if generated == 0 and not response.get("output") else None
    if status == "incomplete":
        details = response.get("incomplete_details")
        return ABORT if isinstance(details, dict) and details.get("reason") not in _LIMITS else None
    return ABORT if status in _NO_ENDS else None


def _status(error: dict[str, Any]) -> int:
    """The status that an error's `code` or `type` stands for: 4xx if it is the request's fault."""
    code, kind = error.get("code"), error.get("type")
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return code
    named = " ".join(each for each in (code, kind) if isinstance(each, str) and each != "error")
    if _RATE_LIMIT.search(named):
        return 429
    return 500 if not named or _ENGINE.search(named) else 400
