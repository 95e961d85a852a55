"""Makes text of others fit for a terminal. Anybody may write into the store, and a gateway or a replica may be
anybody's: nothing of their text must move the cursor, set a title or change colours."""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    """One line."""
    return "".join(char if char.isprintable() else "?" for char in text)


def printable_lines(text: str) -> str:
    """The same lines."""
    return "\n".join(map(printable, text.split("\n")))


def all_printable(value: Any) -> Any:
    """A JSON value with each text in it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): all_printable(inner) for key, inner in value.items()}
    return [all_printable(inner) for inner in value] if isinstance(value, list) else value
