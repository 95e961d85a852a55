"""What a gateway looks at in a stream of server-sent events while the bytes go by.

Whole events are passed on as they arrived, in the same write; only the unfinished end of one is held back, which no
client could use yet. That is what makes it possible to end a broken stream with a well-formed error event, and to
take out the usage chunk that the gateway asked for and the client did not.
"""

from __future__ import annotations

from typing import Any

import orjson


class EventRelay:
    """Feeds on a replica's bytes; yields what the client gets. One per stream."""

    def __init__(self, strip_usage: bool, end_marks: tuple[bytes, ...]) -> None:
        self.document: dict[str, Any] = {}
        """The last event that carried usage."""
        self.saw_end = not end_marks
        """Whether the stream has said that it is complete (always, where no mark is defined)."""
        self._end_marks = end_marks  # of lines: no JSON string holds a line break, so no content can pass for one
        self._strip_usage = strip_usage
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """The complete events in what arrived so far, to send on now (may be empty)."""
        data = self._tail + chunk if self._tail else chunk
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
        if b'"usage"' in ready:
            ready = self._take_usage(ready)
        if not self.saw_end:
            self.saw_end = any(ready.startswith(mark) or b"\n" + mark in ready for mark in self._end_marks)
        return ready

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


def error_event(body: bytes) -> bytes:
    """A stream's last words: an error in OpenAI's shape, as an event of its own."""
    return b"data: " + body + b"\n\n"


def _end_of_last_event(data: bytes) -> int:
    lf = data.rfind(b"\n\n")
    crlf = data.rfind(b"\r\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _split_events(data: bytes) -> list[bytes]:
    """Complete events, each with its blank line."""
    separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    return [part + separator for part in data.split(separator) if part]
