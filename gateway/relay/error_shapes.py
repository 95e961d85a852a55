"""How each API shapes an error: as an answer, and as the last event of a stream that has begun. The path decides.

Sources: OpenAI's reference (the error object; the `error` event of responses) and Anthropic's (errors; the `error`
event of messages). The official SDKs raise on each of these events, and on no other shape of them.
"""

from __future__ import annotations

import orjson

from gateway.errors import ApiError

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """The JSON body of an answer that is an error."""
    return orjson.dumps(_anthropic(error, request_id)) if is_anthropic(path) else error.body()


def error_event(error: ApiError, path: str, request_id: str, sequence_number: int) -> bytes:
    """The last event of a stream that broke; `sequence_number` counts a response's events and is used for them alone.

    An `error` event of a response has its fields at the top. OpenAI's SDKs give such an event to their caller as any
    other; what they raise on is an object `error` in its data, so it has that as well.
    """
    if is_anthropic(path):
        return b"event: error\ndata: " + orjson.dumps(_anthropic(error, request_id)) + b"\n\n"
    if path != "/v1/responses":
        return b"data: " + error.body() + b"\n\n"
    event = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": sequence_number,
        "error": error.document(),
    }
    return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


def _anthropic(error: ApiError, request_id: str) -> dict[str, object]:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    shown = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": shown, "request_id": request_id}
