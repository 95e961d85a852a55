"""How a replica says no, in vLLM's JSON shapes."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import orjson

_TYPE_OF_STATUS = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    501: "NotImplementedError",
}


@dataclass(slots=True)
class Refused(Exception):
    """A request that is answered with an error; `type` None takes vLLM's name for the status."""

    status: int
    message: str
    param: str | None = None
    type: str | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.message}"

    def openai_body(self) -> bytes:
        error = {"message": self.message, "type": self._type(), "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})

    def anthropic_body(self) -> bytes:
        """The shape of /v1/messages."""
        return orjson.dumps({"type": "error", "error": {"type": self._type(), "message": self.message}})

    def _type(self) -> str:
        if self.type is not None:
            return self.type
        return _TYPE_OF_STATUS.get(self.status) or HTTPStatus(self.status).phrase


def bad_request(message: str, param: str | None = None) -> Refused:
    return Refused(400, message, param)
