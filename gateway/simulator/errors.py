"""Errors of a replica, in vLLM's JSON shapes."""

from __future__ import annotations

from dataclasses import dataclass
from http.client import responses

import orjson

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

    def body_for(self, path: str) -> bytes:
        """In the shape of the path's API."""
        kind = self.type or _TYPE_OF_STATUS.get(self.status) or responses.get(self.status, "Error")
        if path.startswith("/v1/messages"):
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


def bad_request(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(400, message, param)


def not_found() -> RequestRefused:
    """The answer to an unknown path."""
    return RequestRefused(404, "Not Found", None, "Not Found")
