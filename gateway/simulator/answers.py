"""A replica's answers: words drawn from the prompt's digest, or a text that fits a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from gateway.simulator.prompt import TOKEN_BYTES, token_of
from gateway.simulator.structured import Constraint, schema_constraint
from gateway.simulator.words import WORDS

DEFAULT_TOKENS = 16
"""The length of an answer if the request does not limit it."""

_FIRST_WORDS = [word + " " for word in WORDS]
_LAST_WORDS = [word + "." for word in WORDS]


@dataclass(frozen=True, slots=True)
class GeneratedToolCall:
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """A complete planned answer: its tokens' texts, and why it ends. With `tool`, they are the call's arguments."""

    pieces: Sequence[str]
    finish_reason: str
    tool: GeneratedToolCall | None = None
    stop_reason: int | str | None = None
    """The stop string or token that ended it."""
    shown: Sequence[str] | None = None
    """What each token adds to the client's text; None if each adds its own text."""

    @property
    def texts(self) -> Sequence[str]:
        """What each token adds to the client's text."""
        return self.pieces if self.shown is None else self.shown

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def tokens(self) -> bytes:
        return b"".join(token_of(piece) for piece in self.pieces if piece)

    def aborted(self, num_tokens: int) -> GeneratedAnswer:
        """The answer if the engine aborts it after this many tokens. A last piece without a text tells the reason."""
        pieces, shown = [*self.pieces[:num_tokens], ""], [*self.texts[:num_tokens], ""]
        return replace(self, pieces=pieces, shown=shown, finish_reason="abort", stop_reason=None)

    @property
    def engine_reason(self) -> str:
        """Why the engine stopped. An engine does not know of tool calls."""
        return "length" if self.finish_reason == "length" else "stop"


def text_answer(seed: bytes, num_tokens: int, finish_reason: str = "length") -> GeneratedAnswer:
    drawn = blake3(seed).digest(length=num_tokens)
    words = [_FIRST_WORDS[byte] for byte in drawn]
    words[-1] = _LAST_WORDS[drawn[-1]]
    return GeneratedAnswer(words, finish_reason)


def constrained_answer(seed: bytes, constraint: Constraint, max_tokens: int) -> GeneratedAnswer:
    """The text that a constraint gives, cut off only by `max_tokens`."""
    return _cut(constraint(seed), "stop", max_tokens, None)


def tool_answer(seed: bytes, function: dict[str, Any], finish_reason: str, max_tokens: int) -> GeneratedAnswer:
    """A call of `function` (name, parameters) with arguments that its schema accepts, cut off only by `max_tokens`."""
    arguments = schema_constraint(function.get("parameters") or {"type": "object"})(seed)
    call = GeneratedToolCall(f"chatcmpl-tool-{blake3(seed).hexdigest()[:32]}", str(function["name"]))
    return _cut(arguments, finish_reason, max_tokens, call)


def nothing() -> GeneratedAnswer:
    """The answer to a pooling request, which computes a prompt and generates no token."""
    return GeneratedAnswer((), "stop")


def _cut(text: str, finish_reason: str, max_tokens: int, tool: GeneratedToolCall | None) -> GeneratedAnswer:
    pieces = _pieces(text)
    if len(pieces) > max_tokens:
        return GeneratedAnswer(pieces[:max_tokens], "length", tool)
    return GeneratedAnswer(pieces, finish_reason, tool)


def _pieces(text: str) -> list[str]:
    """Splits a text into tokens, each with as many whole characters as fit."""
    if text.isascii():
        return [text[at : at + TOKEN_BYTES] for at in range(0, len(text), TOKEN_BYTES)]
    pieces = [""]
    room = TOKEN_BYTES
    for char in text:
        num_bytes = len(char.encode())
        if num_bytes > room:
            pieces.append("")
            room = TOKEN_BYTES
        pieces[-1] += char
        room -= num_bytes
    return pieces
