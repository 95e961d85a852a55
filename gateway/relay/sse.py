"""What a gateway looks at in a stream of server-sent events while the bytes go by.

Whole events are passed on as they arrived, in the same write; only the unfinished end of one is held back, which no
client could use yet. That is what makes it possible to end a broken stream with a well-formed error event, and to
take out what the gateway asked for and the client did not: the usage chunk, token ids.

Whatever a replica sends, a piece costs no more than a look at its new bytes: large events are not parsed.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import orjson

from coordinator.engine.light_json import is_light
from gateway.upstream.excerpts import WINDOW_BYTES, last_usage

MAX_EVENT_BYTES = 8 * 2**20
"""How much of an event is gathered before it is complete."""
MAX_PARSED_BYTES = 2**20
"""Of what must be parsed: token ids have to be taken out."""
_LARGE_BYTES = 2**18

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s{0,9}:\s{0,9}(\d{1,15})')
_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_LONGEST_SEAM = 3
"""Bytes before a read that the end of an event may begin with."""


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
        self.usage: dict[str, Any] | None = None
        """As the last event had it that carried one."""
        self.saw_end = not end_marks
        """Whether the stream has said that it is complete (always, where no mark is defined)."""
        self._end_marks = end_marks  # of lines: no JSON string holds a line break, so no content can pass for one
        self.prompt_token_ids: list[int] = []
        """Of the first prompt, where they are read."""
        self._strip_usage = strip_usage
        self._reads_token_ids = reads_token_ids
        self._strip_token_ids = strip_token_ids
        self._tail = bytearray()

    @property
    def held_bytes(self) -> int:
        """What has come of an event that is not complete; nobody may be given more than MAX_EVENT_BYTES to hold."""
        return len(self._tail)

    def feed(self, chunk: bytes) -> bytes:
        """The complete events in what arrived so far, to send on now (may be empty)."""
        tail = self._tail
        if not tail:
            if chunk.endswith(b"\n\n"):
                return self._passed(chunk)
            end = _end_of_last_event(chunk, 0)
            tail += chunk[end:] if end else chunk
            return self._passed(chunk[:end]) if end else b""
        seen = max(0, len(tail) - _LONGEST_SEAM)
        tail += chunk
        if len(tail) > _LARGE_BYTES:
            return self._feed_large(seen)
        end = _end_of_last_event(tail, seen)
        if end == 0:
            return b""
        self._tail = tail[end:]
        return self._passed(bytes(tail[:end]))

    def _feed_large(self, seen: int) -> bytes:
        """What is held is an event too large to be parsed, or the end of one and much behind it."""
        tail = self._tail
        end = _end_of_first_event(tail, seen)
        if end == 0:
            return b""
        behind, self._tail = bytes(tail[end:]), bytearray()
        del tail[end:]
        first = self._passed_alone(bytes(tail))
        return first + self.feed(behind) if behind else first

    def finish(self) -> bytes:
        """At a clean end: the last event, of a server that leaves out the blank line behind it."""
        rest, self._tail = bytes(self._tail), bytearray()
        return self._passed(rest) if rest else b""

    def _passed(self, ready: bytes) -> bytes:
        if len(ready) > _LARGE_BYTES:
            return b"".join(self._passed_alone(event) for event in split_events(ready))
        if self._reads_token_ids and b"token_ids" in ready:
            ready = b"".join(self._token_ids_read(event) for event in split_events(ready))
        if b'"usage"' in ready:
            ready = self._take_usage(ready)
        if not self.saw_end:
            for mark in self._end_marks:
                if mark in ready and _begins_a_line(mark, ready):
                    self.saw_end = True
        return ready

    def _passed_alone(self, event: bytes) -> bytes:
        if len(event) <= _LARGE_BYTES:
            return self._passed(event)
        if self._reads_token_ids and b"token_ids" in event:  # a long prompt's
            event = self._token_ids_read(event)
        self.usage = last_usage(event) or self.usage
        beginning = event[:WINDOW_BYTES]
        self.saw_end = self.saw_end or any(_begins_a_line(mark, beginning) for mark in self._end_marks)
        return event

    def _token_ids_read(self, event: bytes) -> bytes:
        is_read = b"token_ids" in event and len(event) <= MAX_PARSED_BYTES and is_light(event)
        document = event_data(event) if is_read else None
        if document is None:
            return event
        found = take_token_ids(document)
        self.prompt_token_ids = self.prompt_token_ids or found
        return _with_data(event, document) if self._strip_token_ids else event

    def _take_usage(self, ready: bytes) -> bytes:
        """Read the last event that has usage, and take out those that have nothing else."""
        kept: list[bytes] = []
        latest = None
        for event in reversed(split_events(ready)):
            if b'"usage"' in event and _HAS_USAGE.search(event):
                has_no_more = self._strip_usage and _NO_CHOICES.search(event) is not None
                document = (event_data(event) if has_no_more or latest is None else None) or {}
                usage = document.get("usage")
                if isinstance(usage, dict):
                    latest = latest or usage
                    if has_no_more and document.get("choices") == []:
                        continue
            kept.append(event)
        self.usage = latest or self.usage
        return b"".join(reversed(kept))


def event_data(event: bytes) -> dict[str, Any] | None:
    """The JSON object that an event carries, or None. A response's final event nests usage in `response`; Anthropic's
    in `message`: both are lifted, so that `usage` is always at the top."""
    begin = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
    if not event.startswith(b"data:", begin):
        return None
    end = event.find(b"\n", begin)
    try:
        document = orjson.loads(event[begin + 5 : end if end >= 0 else len(event)])
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


def split_events(data: bytes) -> list[bytes]:
    """Complete events, each with its blank line."""
    separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    return [part + separator for part in data.split(separator) if part]


def _begins_a_line(mark: bytes, data: bytes) -> bool:
    return data.startswith(mark) or b"\n" + mark in data


def _end_of_last_event(data: bytes | bytearray, start: int) -> int:
    """Where the last event in `data` ends, if that is behind `start`; 0 if it is not."""
    lf = data.rfind(b"\n\n", start)
    crlf = data.rfind(b"\r\n\r\n", start)
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _end_of_first_event(data: bytearray, start: int) -> int:
    """Where the first event that ends behind `start` ends; 0 if none does."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := data.find(mark, start)) >= 0]
    return min(ends, default=0)
