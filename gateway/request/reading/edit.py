"""Changes a JSON text in a few places, and leaves every other character as it is. Pure.

A parser and a writer would change more than was meant: numbers that are too large for them, the spelling of others,
duplicate keys, escapes. The text must be valid JSON, and UTF-8. Keys are compared decoded, as `\\u0073` is an `s`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

Text = bytes | bytearray | memoryview
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,\]} \t\r\n]*")
_STRUCTURE = re.compile(rb'["{}\[\]]')
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
"""It never goes back, so it keeps no marks to go back to."""
_TOKENS_PER_STEP = 8
_QUOTE, _BACKSLASH, _OPEN_OBJECT, _COMMA = b'"\\{,'


@dataclass(slots=True)
class Edit:
    """The changes of one object or list. A list has only `inner`, by index."""

    cut: set[str] = field(default_factory=set)
    """Keys to leave out, each time that they occur."""
    added: dict[str, Any] = field(default_factory=dict)
    """New members at its end. A key that is there already is replaced."""
    inner: dict[str | int, Edit] = field(default_factory=dict)
    """Changes within a member or element. Of several members with such a key the last one counts: the others are left
    out."""

    def at(self, place: _Place | None) -> Edit:
        """The changes at a place within it."""
        return self if place is None else self.at(place.holder).inner.setdefault(place.step, Edit())


class _Place(NamedTuple):
    """A member or an element of the value at another place."""

    holder: _Place | None
    step: str | int


def edited(text: bytes | bytearray, edit: Edit) -> bytes:
    """The text of a JSON object with these changes."""
    view = memoryview(text)
    pieces, _ = _container(text, view, _space(text, 0), edit)
    return b"".join(pieces)


def edits_of(document: dict[str, Any], parts: Iterable[dict[str, Any]], name: str) -> Edit:
    """The changes that give each of these parts, somewhere in a document, the field `name` that it has now, or none."""
    missing = {id(part) for part in parts}
    top = Edit()
    waiting: list[tuple[Any, _Place | None]] = [(document, None)]
    while waiting and missing:
        value, place = waiting.pop()
        if id(value) in missing:
            missing.discard(id(value))
            edit = top.at(place)
            edit.cut.add(name)
            if name in value:
                edit.added[name] = value[name]
        members = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [(inner, _Place(place, step)) for step, inner in members if isinstance(inner, dict | list)]
    return top


def steps_of(text: bytes | bytearray) -> int:
    """How much work an edit of this text may be, in steps."""
    return (text.count(b",") + text.count(b"[") + text.count(b"{")) // _TOKENS_PER_STEP


def _container(text: bytes | bytearray, view: memoryview, start: int, edit: Edit) -> tuple[list[Text], int]:
    """The pieces of the object or list that begins here, and where it ends."""
    is_object, replaced = text[start] == _OPEN_OBJECT, edit.cut | edit.added.keys()
    kept: list[list[Text]] = []
    edited_at: dict[str | int, int] = {}
    """Where in `kept` a member is whose content changes."""
    at, index = _space(text, start + 1), 0
    while text[at] not in b"}]":
        begin, key = at, index
        name, at = _key(text, at) if is_object else (key, at)
        inner = edit.inner.get(name)
        if inner is not None and text[at] in b"{[":
            pieces, end = _container(text, view, at, inner)
            pieces.insert(0, view[begin:at])
        else:
            end = _value_end(text, at)
            pieces = [view[begin:end]]
        if name not in replaced:
            if inner is not None:
                if (earlier := edited_at.get(name)) is not None:
                    kept[earlier] = []
                edited_at[name] = len(kept)
            kept.append(pieces)
        at, index = _space(text, end), index + 1
        if text[at] == _COMMA:
            at = _space(text, at + 1)
    joined: list[Text] = []
    for pieces in filter(None, kept):
        joined += (b",", *pieces)
    if edit.added:
        joined += (b",", orjson.dumps(edit.added)[1:-1])
    joined[:1] = [b"{" if is_object else b"["]
    return [*joined, b"}" if is_object else b"]"], at + 1


def _key(text: bytes | bytearray, start: int) -> tuple[str, int]:
    """The key of the member that begins here, and where its value begins."""
    end = _string_end(text, start)
    key = bytes(text[start:end])
    name = str(orjson.loads(key)) if b"\\" in key else key[1:-1].decode()
    return name, _space(text, _space(text, end) + 1)  # behind the colon


def _space(text: bytes | bytearray, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _value_end(text: bytes | bytearray, at: int) -> int:
    first = text[at]
    if first == _QUOTE:
        return _string_end(text, at)
    if first not in b"{[":
        found = _SCALAR.match(text, at)
        return found.end() if found else at
    depth = 0
    while mark := _STRUCTURE.search(text, at):
        at = mark.end()
        if text[at - 1] == _QUOTE:
            at = _string_end(text, at - 1)
        else:
            depth += 1 if text[at - 1] in b"{[" else -1
            if depth == 0:
                break
    return at


def _string_end(text: bytes | bytearray, start: int) -> int:
    """The end of the string that begins here. Most strings have no escaped quotation mark and are not searched by the
    expression, which takes longer."""
    at = text.find(b'"', start + 1)
    if text[at - 1] != _BACKSLASH:
        return at + 1
    found = _STRING.match(text, start)
    assert found is not None
    return found.end()
