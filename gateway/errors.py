"""The exception that ends a request, and OpenAI's JSON shape of an error.

Every error from KVGate itself has this body; on paths of other APIs it has the shape of gateway/relay/error_shapes.py.
Programs can branch on its `code`, and for bad input its `param` names the field:

    {"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(slots=True)
class ApiError(Exception):
    """A request that the gateway refuses or cannot serve. `headers` are added to the answer (Retry-After)."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    over_budget: dict[str, Any] | None = None
    """The budget that refused, for the request's record."""

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    @property
    def type(self) -> str:
        """OpenAI's `type`: the family of the error."""
        if self.status >= 500:
            return "server_error"
        return _TYPE_OF_STATUS.get(self.status, "invalid_request_error")

    def document(self) -> dict[str, str | None]:
        """OpenAI's error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        """The JSON body, in OpenAI's shape."""
        return orjson.dumps({"error": self.document()})


def bad_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field, in OpenAI's dotted form (`messages[0].content[1].image_url.url`)."""
    return ApiError(400, code, f"{param}: {message}", param)
