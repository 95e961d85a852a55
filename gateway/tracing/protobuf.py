"""Writes protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), as far as spans need it.

This is not done by Google's library: once a process has written messages with it, each request that follows costs 3 to
6 % more, also those that are not traced (docs/evidence/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

_SMALL = [bytes((number,)) for number in range(128)]
_INT64 = range(-(2**63), 2**63)
fixed32 = Struct("<I").pack
fixed64 = Struct("<Q").pack
double = Struct("<d").pack


def varint(number: int) -> bytes:
    """A number of type int64, uint64 up to 2**63, or an enum. Raises OverflowError."""
    if 0 <= number < 128:
        return _SMALL[number]
    if number not in _INT64:
        raise OverflowError("more than 64 bits")
    number &= 2**64 - 1  # two's complement
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


def sized(tag: bytes, data: bytes) -> bytes:
    """A field with a text, with bytes, or with a message."""
    size = len(data)
    return tag + (_SMALL[size] if size < 128 else varint(size)) + data  # a span has dozens: most need no call


def _tags_of(kind: int) -> Callable[[int], bytes]:
    """Makes the tag of a field of this kind."""
    return lambda field: varint(field << 3 | kind)


of_varint, of_fixed64, of_sized, of_fixed32 = map(_tags_of, (0, 1, 2, 5))
"""The tags before a number; a `fixed64` or a `double`; a text, bytes or a message; a `fixed32`."""
