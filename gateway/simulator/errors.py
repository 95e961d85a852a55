"""Errors of a replica, in vLLM's JSON shapes."""

from __future__ import annotations

from dataclasses import dataclass
from http.client import responses

import orjson

UNREADABLE = "Bad Request"
"""The error type for a body with a field of a wrong type."""
_TYPE_OF_STATUS = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    501: "NotImplementedError",
}


@dataclass(slots=True)
class RequestRefused(Exception):
    """A request that is answered with an error. `type` None means vLLM's name of the status."""

    status: int
    message: str
    param: str | None = None
    type: str | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.message}"

    def openai_body(self) -> bytes:
        error = {"message": self.message, "type": self._type(), "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})

    def body_for(self, path: str) -> bytes:
        """In the shape of the path's API. vLLM uses OpenAI's on /v1/messages, too, for requests that it cannot read."""
        if self.type == UNREADABLE or not path.startswith("/v1/messages"):
            return self.openai_body()
        return orjson.dumps({"type": "error", "error": {"type": self._type(), "message": self.message}})

    def _type(self) -> str:
        return self.type or _TYPE_OF_STATUS.get(self.status) or responses.get(self.status, "Error")


def bad_request(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(400, message, param)


def bad_value(message: str, param: str, value: object = None) -> RequestRefused:
    """A 400 for a parameter. vLLM's message ends with its name."""
    told = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return RequestRefused(400, f"{message} ({told})", param)


def not_found() -> RequestRefused:
    """The answer to an unknown path."""
    return RequestRefused(404, "Not Found", None, "Not Found")
