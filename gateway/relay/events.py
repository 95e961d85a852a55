"""Reads server-sent events by WHATWG's standard (HTML, section 9.2.6). Pure.

A line ends with LF, CRLF or CR, and a blank line ends an event. A space after a field's colon is no part of its value.
An event may have several data lines, comments and other fields. A stream may begin with a byte-order mark. In most
streams all lines end with LF; they take the short way.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson

from gateway.upstream.excerpts import WINDOW_BYTES

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?=[^\n]))|\r\r\Z")
"""A CR at the end of what has come may be half a CRLF, unless the line before ends with CR alone."""
_BOM = b"\xef\xbb\xbf"
_TYPE = re.compile(rb'"type"\s{0,9}:\s{0,9}"([a-z_.]{1,64})"')


class Event(NamedTuple):
    """The fields of an event. `name` is empty if it has none."""

    name: bytes
    data: bytes


def read_event(event: bytes) -> Event:
    """The fields of one complete event. A comment has no data."""
    line, _, rest = event.partition(b"\n")
    if line.startswith(b"data:") and rest in (b"\n", b"") and b"\r" not in line:  # as most events are
        return Event(b"", line[5:].removeprefix(b" "))
    name, data = b"", []
    for line in event.removeprefix(_BOM).splitlines():  # of bytes: at LF, CRLF and CR only
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(name, b"\n".join(data))


def event_data(event: bytes) -> dict[str, Any] | None:
    """The JSON object in an event, or None. OpenAI's responses have their usage in `response`, Anthropic's messages in
    `message`. Here it is always at the top."""
    try:
        document = orjson.loads(read_event(event).data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    for nested in ("response", "message"):
        inner = document.get(nested)
        if "usage" not in document and isinstance(inner, dict) and "usage" in inner:
            return {**document, "usage": inner["usage"]}
    return document


def kind_of(event: bytes) -> bytes:
    """What an event is: `[DONE]`, if that is its data; its name; without one, the `type` in its data."""
    name, data = read_event(event)
    if data.strip() == b"[DONE]":
        return b"[DONE]"
    if name not in (b"", b"message"):  # the standard's own name for an event without one
        return name
    if not data.startswith(b"{"):
        return b""
    document = event_data(event) if len(data) <= WINDOW_BYTES else None
    if document is not None:
        kind = document.get("type")
        return kind.encode("utf-8", "replace") if isinstance(kind, str) else b""
    found = _TYPE.search(data, 0, WINDOW_BYTES)
    return found[1] if found else b""


def has_kind(data: bytes, kind: bytes) -> bool:
    """Whether one of these events is of a kind. The word in an event's text is not enough."""
    if b"\r" in data:
        return any(kind in event and kind_of(event) == kind for event in split_events(data))
    at = data.rfind(kind)
    while at >= 0:
        begin, end = bounds_of_event(data, at)
        if kind_of(data[begin:end]) == kind:
            return True
        at = data.rfind(kind, 0, begin)
    return False


def bounds_of_event(data: bytes, at: int) -> tuple[int, int]:
    """Where the event begins and ends that has this place. `data` is one event, or its lines end with LF."""
    begin, end = data.rfind(b"\n\n", 0, at), data.find(b"\n\n", at)
    return begin + 2 if begin >= 0 else 0, end + 2 if end >= 0 else len(data)


def with_data(event: bytes, document: dict[str, Any]) -> bytes:
    """The event with another object as its data. Its other lines stay."""
    lines = event.removeprefix(_BOM).splitlines(keepends=True)
    others = (line for line in lines if line.strip(b"\r\n") and line.rstrip(b"\r\n").partition(b":")[0] != b"data")
    return b"".join(others) + b"data: " + orjson.dumps(document) + b"\n\n"


def split_events(data: bytes) -> list[bytes]:
    """Events, each with its blank line, which the last one may lack. Joined, they are the data."""
    if b"\r" not in data:
        *parts, rest = data.split(b"\n\n")
        events = [part + b"\n\n" for part in parts]
        return [*events, rest] if rest else events
    ends = [found.end() for found in _BLANK_LINE.finditer(data)]
    if not ends or ends[-1] < len(data):
        ends.append(len(data))
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def end_of_last_event(data: bytes | bytearray, start: int) -> int:
    """The end of the last event in `data`, if that is after `start`; else 0."""
    if data.find(b"\r", start) < 0:
        at = data.rfind(b"\n\n", start)
        return at + 2 if at >= 0 else 0
    end = 0
    for found in _BLANK_LINE.finditer(data, start):
        end = found.end()
    return end


def end_of_first_event(data: bytes | bytearray, start: int) -> int:
    """The end of the first event that ends after `start`; 0 if there is none."""
    if data.find(b"\r", start) < 0:  # as in most streams: 30 times as fast as the expression
        at = data.find(b"\n\n", start)
        return at + 2 if at >= 0 else 0
    found = _BLANK_LINE.search(data, start)
    return found.end() if found else 0
