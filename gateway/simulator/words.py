"""The vocabulary of a simulated replica."""

from __future__ import annotations

from itertools import product

WORDS = ["".join(letters) for letters in product("bdfgklmnprstvzhj", "aeio", "dlnr")]
"""256 words of three letters. With a space or a full stop, each is one token."""
