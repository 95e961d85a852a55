"""Counts the values of a JSON text before it is parsed.

A parser makes an object of every value: 64 MiB of `{},` become 1.5 GB, and the parser holds Python's lock meanwhile.
Counting costs about 2 ns per byte and no memory. It removes escapes, then all characters but structure and quotes, then
the text between quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from gateway.errors import ApiError

MAX_FIELDS = 262_144
"""Of all objects."""
MAX_ELEMENTS = 4_194_304
"""Of all lists and objects: the parsed values take up to 200 MiB, which count as held. A prompt of a million token ids
has a million elements."""
MAX_NESTING = 128
"""Levels of lists and objects. Schemas of tools have a dozen."""
_SLICE_BYTES: Final = 2**18
_OTHER: Final = bytes(set(range(256)) - set(b'{}[]",:'))
_BACKSLASH: Final = 0x5C
_MORE_BACKSLASHES: Final = re.compile(rb"\\*")
_STRING: Final = re.compile(rb'"[^"]*"')
_NOT_BRACKETS: Final = b'",:'
_DEPTH: Final = tuple({"{": 1, "[": 1, "}": -1, "]": -1}.get(chr(byte), 0) for byte in range(256))


def check_structure(body: bytes | bytearray) -> None:
    """Raises a 400 that names the limit which a JSON text exceeds. A text that is not JSON may pass; the parser refuses
    it later."""
    if not _may_exceed(body):
        return
    fields = elements = depth = 0
    for structure in _structure(body):
        fields += structure.count(b":")
        elements += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        if fields > MAX_FIELDS:
            raise _too_many("fields", MAX_FIELDS)
        if elements > MAX_ELEMENTS:
            raise _too_many("values", MAX_ELEMENTS)
        brackets = structure.translate(None, _NOT_BRACKETS)
        if brackets:
            depths = list(accumulate(map(_DEPTH.__getitem__, brackets), initial=depth))
            depth = depths[-1]
            if max(depths) > MAX_NESTING:
                message = f"body: nested more than {MAX_NESTING} deep."
                raise ApiError(400, "limit_exceeded", message, "body")


def is_sparse(body: bytes | bytearray, marks: int = 1024) -> bool:
    """Whether a JSON text has few values and escapes. Then parsing it costs little more than a copy."""
    return not any(_has_more_than(body, mark, marks) for mark in (b"{", b"[", b",", b'"', b"\\"))


def nesting(text: bytes | bytearray) -> int:
    """How many more objects and lists a part of a JSON text opens than it closes. It begins outside of strings."""
    return sum(part.count(b"{") + part.count(b"[") - part.count(b"}") - part.count(b"]") for part in _structure(text))


def _may_exceed(body: bytes | bytearray) -> bool:
    """Whether the text could exceed a limit. A field takes at least 5 bytes, a value at least 2."""
    return (
        len(body) > 5 * MAX_FIELDS
        or len(body) > 2 * MAX_ELEMENTS
        or _has_more_than(body, b"{", MAX_NESTING // 2)
        or _has_more_than(body, b"[", MAX_NESTING // 2)
    )


def _has_more_than(body: bytes | bytearray, mark: bytes, count: int) -> bool:
    """Whether a mark occurs more than `count` times, in strings or outside. Stops at the first mark above `count`."""
    position = -1
    for _ in range(count + 1):
        position = body.find(mark, position + 1)
        if position < 0:
            return False
    return True


def _structure(body: bytes | bytearray) -> Iterator[bytes]:
    """The braces, brackets, commas and colons of a JSON text outside of its strings, slice by slice."""
    view, start, in_string = memoryview(body), 0, False
    while start < len(body):
        end = min(start + _SLICE_BYTES, len(body))
        if body[end - 1] == _BACKSLASH and (more := _MORE_BACKSLASHES.match(body, end)):  # keeps an escape in one slice
            end = min(more.end() + 1, len(body))
        piece = bytes(view[start:end])
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = piece.translate(None, _OTHER)
        if in_string:
            marks = b'"' + marks
        in_string = marks.count(b'"') % 2 == 1
        if in_string:
            marks += b'"'
        yield _STRING.sub(b"", marks)
        start = end


def _too_many(what: str, limit: int) -> ApiError:
    return ApiError(400, "limit_exceeded", f"body: has more than {limit} {what}.", "body")
