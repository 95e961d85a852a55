"""What a gateway looks at in a stream of server-sent events while the bytes go by.

Whole events are passed on as they arrived, in the same write; only the unfinished end of one is held back, which no
client could use yet. That is what makes it possible to end a broken stream with a well-formed error event, and to
take out what the gateway asked for and the client did not: the usage chunk, token ids.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import orjson

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s{0,9}:\s{0,9}(\d{1,15})')


class EventRelay:
    """Feeds on a replica's bytes; yields what the client gets. One per stream."""

    def __init__(
        self,
        strip_usage: bool,
        end_marks: tuple[bytes, ...],
        *,
        reads_token_ids: bool = False,
        strip_token_ids: bool = False,
    ) -> None:
        self.document: dict[str, Any] = {}
        """The last event that carried usage."""
        self.saw_end = not end_marks
        """Whether the stream has said that it is complete (always, where no mark is defined)."""
        self._end_marks = end_marks  # of lines: no JSON string holds a line break, so no content can pass for one
        self.prompt_token_ids: list[int] = []
        """Of the first prompt, where they are read."""
        self._strip_usage = strip_usage
        self._reads_token_ids = reads_token_ids
        self._strip_token_ids = strip_token_ids
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """The complete events in what arrived so far, to send on now (may be empty)."""
        data = self._tail + chunk if self._tail else chunk
        if data.endswith(b"\n\n"):
            self._tail = b""
            return self._passed(data)
        end = _end_of_last_event(data)
        if end == 0:
            self._tail = data
            return b""
        self._tail = data[end:]
        return self._passed(data if end == len(data) else data[:end])

    def finish(self) -> bytes:
        """At a clean end: the last event, of a server that leaves out the blank line behind it."""
        rest, self._tail = self._tail, b""
        return self._passed(rest) if rest else b""

    def _passed(self, ready: bytes) -> bytes:
        if self._reads_token_ids and b"token_ids" in ready:
            ready = b"".join(self._token_ids_read(event) for event in _split_events(ready))
        if b'"usage"' in ready:
            ready = self._take_usage(ready)
        if not self.saw_end:
            for mark in self._end_marks:
                if mark in ready and (ready.startswith(mark) or b"\n" + mark in ready):
                    self.saw_end = True
        return ready

    def _token_ids_read(self, event: bytes) -> bytes:
        document = event_data(event) if b"token_ids" in event else None
        if document is None:
            return event
        found = take_token_ids(document)
        self.prompt_token_ids = self.prompt_token_ids or found
        return _with_data(event, document) if self._strip_token_ids else event

    def _take_usage(self, ready: bytes) -> bytes:
        kept = []
        for event in _split_events(ready):
            document = event_data(event) if b'"usage"' in event else None
            if document is not None and isinstance(document.get("usage"), dict):
                self.document = document
                if self._strip_usage and document.get("choices") == []:
                    continue
            kept.append(event)
        return b"".join(kept)


def event_data(event: bytes) -> dict[str, Any] | None:
    """The JSON object that an event carries, or None. A response's final event nests usage in `response`; Anthropic's
    in `message`: both are lifted, so that `usage` is always at the top."""
    line = next((line for line in event.splitlines() if line.startswith(b"data:")), None)
    if line is None:
        return None
    try:
        document = orjson.loads(line[5:])
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    for nested in ("response", "message"):
        inner = document.get(nested)
        if "usage" not in document and isinstance(inner, dict) and "usage" in inner:
            return {**document, "usage": inner["usage"]}
    return document


def _with_data(event: bytes, document: dict[str, Any]) -> bytes:
    """The event with another object in its data line; what stands above that stays."""
    lines = event.splitlines(keepends=True)
    above = takewhile(lambda line: not line.startswith(b"data:"), lines)
    return b"".join(above) + b"data: " + orjson.dumps(document) + b"\n\n"


def take_token_ids(document: dict[str, Any]) -> list[int]:
    """Remove the token ids from an answer, or from a chunk of one; returns the first prompt's (empty: not in it)."""
    choices = [choice for choice in document.get("choices") or () if isinstance(choice, dict)]
    found = document.pop("prompt_token_ids", None)
    for choice in choices:
        choice.pop("token_ids", None)
        of_choice = choice.pop("prompt_token_ids", None)  # where text completions have them
        found = found or of_choice
    return found if isinstance(found, list) else []


def next_sequence_number(events: bytes) -> int:
    """The number of the event that follows these, the last of a streamed response; 0 where they have none."""
    at = events.rfind(b'"sequence_number"')
    found = _SEQUENCE_NUMBER.match(events, at) if at >= 0 else None
    return int(found[1]) + 1 if found else 0


def _end_of_last_event(data: bytes) -> int:
    lf = data.rfind(b"\n\n")
    crlf = data.rfind(b"\r\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _split_events(data: bytes) -> list[bytes]:
    """Complete events, each with its blank line."""
    separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    return [part + separator for part in data.split(separator) if part]
