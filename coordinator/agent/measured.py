"""What gateways tell an agent of a prompt: how long it was, as its engine counted it.

See coordinator/pool/engine_feedback.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

_MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Measured:
    """A prompt's length as its engine counted it, with its tokens where those were asked for."""

    tip: str
    prompt_tokens: int
    token_ids: tuple[int, ...]


def read_measured(text: bytes) -> Measured | None:
    """None for what no gateway wrote."""
    try:
        said = orjson.loads(text)
        token_ids = tuple(int(each) for each in said.get("token_ids") or ())
        measured = Measured(str(said["tip"]), int(said["prompt_tokens"]), token_ids)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    return measured if all(0 <= each <= _MAX_TOKEN_ID for each in (measured.prompt_tokens, *token_ids)) else None
