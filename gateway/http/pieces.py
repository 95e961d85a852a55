"""Gathers bytes that come in pieces, so that they are in memory only once."""

from __future__ import annotations


def joined(held: bytes | bytearray, piece: bytes | bytearray) -> bytes | bytearray:
    """`held`, followed by `piece`.

    A bytearray grows in place. A list of small pieces would take many times their size, and joining a list of large
    pieces takes their size again. A single piece is not copied.
    """
    if not held:
        return piece
    if isinstance(held, bytes):
        held = bytearray(held)
    held += piece
    return held
