"""Finds the field `model` in JSON text without parsing it. Pure.

A quotation mark inside of a string has a backslash. So the bytes `"model"` before a colon are the key `model`, or they
end a longer key, behind a backslash. How deep a key lies is counted only where a text has too many brackets before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from gateway.request.reading.structure import nesting

_STRING = rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")'
FIELD = re.compile(rb'"model"\s*+:\s*+' + _STRING, re.DOTALL)
_ESCAPED_LETTER = b"\\u006"
"""Each letter of `model` can be spelled like this."""
_FIELD_IN_ANY_SPELLING = re.compile(
    rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"\s*+:\s*+' + _STRING, re.DOTALL
)
_BACKSLASH = 0x5C
_MOST_FIELDS = 1024

Span = tuple[int, int]


def model_span(text: bytes | bytearray) -> Span:
    """Where the text of `model` begins and ends in a JSON object that has one. Of several, the last one counts, as for
    engines."""
    field = _FIELD_IN_ANY_SPELLING if _ESCAPED_LETTER in text else FIELD
    found = list(field.finditer(text))
    if len(found) > 1:  # those of inner objects, too
        found = list(_outer(text, found, 1))
    return found[-1].span(1)


def model_fields(text: bytes, most_depth: int) -> Iterator[re.Match[bytes]]:
    """The fields `model` of a JSON object and of those inside it, down to `most_depth`. Group 1 is the text of the
    value. Of a text with very many such fields, only the first ones are looked at."""
    return _outer(text, islice(FIELD.finditer(text), _MOST_FIELDS), most_depth)


def _outer(text: bytes | bytearray, found: Iterable[re.Match[bytes]], most_depth: int) -> Iterator[re.Match[bytes]]:
    """The fields that are not deeper. Every part of the text is looked at twice at most."""
    exact_at = exact = at = at_most = 0
    for field in found:
        begin = field.start()
        if text[begin - 1] == _BACKSLASH:
            continue
        at_most += text.count(b"{", at, begin) + text.count(b"[", at, begin)
        at = begin
        if at_most > most_depth:  # brackets may be closed again, or be in strings
            exact += nesting(text[exact_at:begin])
            exact_at, at_most = begin, exact
        if at_most <= most_depth:
            yield field
