"""A replica's answers: words drawn from the prompt's digest, or a text that fits a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from gateway.simulator import fields
from gateway.simulator.prompt import TOKEN_BYTES, WORDS, token_of
from gateway.simulator.structured import json_text

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


def whole_answer(
    text: str, finish_reason: str, max_tokens: int, tool: GeneratedToolCall | None = None
) -> GeneratedAnswer:
    """This text, cut off only by `max_tokens`. Each token has as many whole characters as fit."""
    pieces = [""]
    for char in text:
        if len((pieces[-1] + char).encode()) > TOKEN_BYTES:
            pieces.append("")
        pieces[-1] += char
    return GeneratedAnswer(pieces[:max_tokens], finish_reason if len(pieces) <= max_tokens else "length", tool)


def tool_answer(seed: bytes, function: dict[str, Any], finish_reason: str, max_tokens: int) -> GeneratedAnswer:
    """A call of `function` (name, parameters) with arguments that its schema accepts."""
    arguments = json_text(function.get("parameters") or {"type": "object"}, seed)
    call = GeneratedToolCall(f"chatcmpl-tool-{blake3(seed).hexdigest()[:32]}", fields.required_text(function, "name"))
    return whole_answer(arguments, finish_reason, max_tokens, call)
