"""Bytes that come in pieces, gathered where they lie: in memory once."""

from __future__ import annotations


def joined(held: bytes | bytearray, piece: bytes | bytearray) -> bytes | bytearray:
    """What is held, and a piece behind it.

    A bytearray grows in place. A list of small pieces would take many times what is in them; joining a list of large
    ones takes their size again. A single piece is not copied.
    """
    if not held:
        return piece
    if isinstance(held, bytes):
        held = bytearray(held)
    held += piece
    return held
