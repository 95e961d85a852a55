"""Gives an answer the model name that its client asked for, where the replica knows the model by another one. Pure.

Only the answer's own name changes. A field `model` deeper inside belongs to somebody else: to the arguments of a tool,
or to the metadata of the client.
"""

from __future__ import annotations

import re

import orjson

from gateway.relay.events import split_events
from gateway.request.reading.model_field import FIELD, model_fields

_DEPTH_OF_BODY = 1
_DEPTH_OF_EVENT = 2
"""Events of responses and messages have the name in `response` and `message`."""
_SPACES = 64
_ESCAPE_BYTES = 12
"""The most bytes of one character."""


class AskedName:
    """Changes the name in one answer."""

    def __init__(self, served: str, asked: str) -> None:
        self._served = served
        self._usual, self._asked = orjson.dumps(served), orjson.dumps(asked)
        self._field_bytes = len(b'"model":""') + _ESCAPE_BYTES * len(served) + _SPACES
        self._held = b""
        self._is_done = False

    def in_body(self, body: bytes) -> bytes:
        """A JSON text with the name that the client asked for."""
        return self._changed(body, _DEPTH_OF_BODY)

    def in_events(self, events: bytes) -> bytes:
        """Whole events with this name."""
        if b'"model"' not in events:
            return events
        return b"".join(self._changed(event, _DEPTH_OF_EVENT) for event in split_events(events))

    def in_piece(self, piece: bytes) -> bytes:
        """The next part of a JSON text that is passed on as it comes. What may be the beginning of the name is held
        back."""
        if self._is_done:
            return piece
        data = self._held + piece
        found = next(filter(self._is_served, FIELD.finditer(data)), None)
        if found is not None:
            self._is_done, self._held = True, b""
            return self._with(data, found)
        end = max(0, len(data) - self._field_bytes)
        self._held = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What was held back, at the end."""
        held, self._held = self._held, b""
        return held

    def _changed(self, text: bytes, most_depth: int) -> bytes:
        found = next(filter(self._is_served, model_fields(text, most_depth)), None)
        return self._with(text, found) if found is not None else text

    def _with(self, text: bytes, field: re.Match[bytes]) -> bytes:
        return b"".join((text[: field.start(1)], self._asked, text[field.end(1) :]))

    def _is_served(self, field: re.Match[bytes]) -> bool:
        value = field[1]
        if b"\\" not in value:
            return value == self._usual
        try:
            return bool(orjson.loads(value) == self._served)
        except orjson.JSONDecodeError:
            return False
