"""What the client of a stream has got so far, kept so that the stream can go on at another replica.

Nothing is parsed while the stream is well. Most events differ in their text and their token ids only, so only these are
kept of them: about 35 bytes a token.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.relay.events import read_event
from gateway.request.admission import Admission

_STEP_BYTES = 4096
"""Bytes are counted in steps. The first one is free."""
_SHARE = 0.5
"""The part of `limits.max_buffered_bytes` beyond which nothing more is kept: clients' requests go before."""
_PART = b"\r"
"""Between the text and the token ids of an event of the usual form. JSON in an event has no line break."""
_END = b"\n\n"
_NO_TEXT = {b'"type":"%b"' % kind.encode(): kind for kind in ("thinking", "tool_use", "reasoning", "function_call")}
"""How a part of a message or a response begins behind which no stream goes on. Text cannot imitate it: inside a string,
quotation marks have a backslash."""
_PARTS = (b'"', b"{")
"""How the text of a part begins. A whole event begins with the name of a field, or with a colon."""


class Sent:
    """The events of one stream, as its replica sent them. Beyond `most_tokens`, or without room, they are forgotten.
    Then the stream cannot go on elsewhere. `has_kinds`: its parts may be of a kind that is no text."""

    __slots__ = (
        "_admission",
        "_checked_bytes",
        "_counted_bytes",
        "_has_kinds",
        "_kept",
        "_most_tokens",
        "_parts",
        "prompt_ids",
        "why_lost",
    )

    def __init__(self, admission: Admission, most_tokens: int, has_kinds: bool = True) -> None:
        self.why_lost = ""
        """Why not all events are here; empty if they are."""
        self.prompt_ids = b""
        """Those of the prompt, as they stand in JSON; empty if no event told them."""
        self._admission = admission
        self._most_tokens = most_tokens
        self._has_kinds = has_kinds
        self._kept = bytearray()
        self._counted_bytes = 0
        self._checked_bytes = _STEP_BYTES
        self._parts = 0

    def keep_prompt(self, ids: bytes) -> None:
        """The token ids of the prompt."""
        self.prompt_ids = ids
        self._check()

    def add(self, events: bytes, parts: int) -> None:
        """Whole events, and how many parts of the answer they have."""
        if self.why_lost:
            return
        self._kept += events
        self._parts += parts
        if self._has_kinds:
            for mark, kind in _NO_TEXT.items():
                if mark in events:
                    self.lose(kind)
        if len(self._kept) > self._checked_bytes:
            self._check()

    def add_part(self, text: bytes, ids: bytes) -> None:
        """The text of an event of the usual form, and its token ids or its number, as they stand in its JSON."""
        self._kept += b"".join((text, _PART, ids, _END))
        self._parts += 1
        if len(self._kept) > self._checked_bytes:
            self._check()

    def _check(self) -> None:
        size_bytes = len(self._kept) + len(self.prompt_ids)
        more_bytes = size_bytes - self._counted_bytes
        self._checked_bytes = len(self._kept) + _STEP_BYTES
        if self.why_lost:
            self.lose(self.why_lost)
        elif self._parts > self._most_tokens:
            self.lose("length")
        elif self._admission.try_spare(more_bytes, _SHARE):
            self._counted_bytes = size_bytes
        else:
            self.lose("memory")

    def lose(self, why: str) -> None:
        """Keep nothing any more."""
        self.why_lost = self.why_lost or why
        self._kept, self.prompt_ids, self._checked_bytes = bytearray(), b"", _STEP_BYTES
        if self._counted_bytes:
            self._admission.let_go(self._counted_bytes)
            self._counted_bytes = 0

    def read(self) -> list[dict[str, Any] | tuple[Any, list[int] | None]]:
        """All events in their order: whole ones as objects; of those of the usual form the text, and the token ids (or
        the event's number) if there are any. Raises ValueError if an event is no JSON."""
        texts = []
        for part in bytes(self._kept).split(_END):
            event = part.lstrip(b"\n")  # it has one behind more than one blank line
            if event.startswith(_PARTS):
                text, _, ids = event.partition(_PART)
                texts.append(b"[%b,%b]" % (text, b"[%b]" % ids if ids else b"null"))
            elif (data := read_event(event).data.strip()).startswith(b"{"):
                texts.append(data)
        found: list[Any] = orjson.loads(b"[" + b",".join(texts) + b"]")
        return [tuple(each) if isinstance(each, list) else each for each in found]
