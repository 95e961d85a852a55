"""Writes protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), as far as spans need it.

This is not done by Google's library: once a process has written messages with it, each request that follows costs 3 to
6 % more, also those that are not traced (docs/evidence/performance.md).
"""

from __future__ import annotations

from struct import Struct

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
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


def of_varint(field: int) -> bytes:
    """The tag before a number."""
    return varint(field << 3 | _VARINT)


def of_fixed64(field: int) -> bytes:
    """The tag before a `fixed64` or a `double`."""
    return varint(field << 3 | _FIXED64)


def of_fixed32(field: int) -> bytes:
    """The tag before a `fixed32`."""
    return varint(field << 3 | _FIXED32)


def of_sized(field: int) -> bytes:
    """The tag before a text, bytes, or a message."""
    return varint(field << 3 | _SIZED)
