"""How each API shapes an error: as an answer, and as the last event of a stream that has begun.

Sources: OpenAI's reference (the error object; the `error` event of responses) and Anthropic's (errors; the `error`
event of messages). The official SDKs raise on each of these events, and on no other shape of them.
"""

from __future__ import annotations

import orjson

from gateway.endpoints import Api
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


def error_body(error: ApiError, api: Api, request_id: str) -> bytes:
    """The JSON body of an answer that is an error."""
    return orjson.dumps(_anthropic(error, request_id)) if api == "anthropic" else error.body()


def error_event(error: ApiError, api: Api, request_id: str, sequence_number: int) -> bytes:
    """The last event of a stream that broke. Only events of OpenAI's responses have a `sequence_number`.

    The `error` event of a response has its fields at the top. OpenAI's SDKs hand such an event to their caller. They
    raise only if its data has an object `error`, so the event has that as well.
    """
    if api == "anthropic":
        return b"event: error\ndata: " + orjson.dumps(_anthropic(error, request_id)) + b"\n\n"
    if api == "openai":
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
