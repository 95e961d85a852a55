"""What a replica says: words drawn from the prompt's digest, or a tool call that fits the tool's schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import orjson
from blake3 import blake3

from bench.simulator.prompt import TOKEN_BYTES, token_of

DEFAULT_TOKENS = 16
"""The length of an answer to a request that names none."""

_WORDS = ["".join(letters) for letters in product("bdfgklmnprstvzhj", "aeio", "dlnr")]
"""256 words of three letters: with a space or a full stop, one token each."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer planned in full: its tokens' texts, and why it ends. With `tool`, they are its arguments."""

    pieces: Sequence[str]
    finish_reason: str
    tool: ToolCall | None = None

    @property
    def tokens(self) -> bytes:
        return b"".join(token_of(piece) for piece in self.pieces)

    @property
    def engine_reason(self) -> str:
        """Why the engine stopped: it knows nothing of tool calls."""
        return "length" if self.finish_reason == "length" else "stop"


def text_answer(seed: bytes, max_tokens: int | None) -> Answer:
    """Exactly `max_tokens` words, cut off by the limit; or as many as the model likes, which is 16."""
    count = DEFAULT_TOKENS if max_tokens is None else max_tokens
    words = [_WORDS[byte] + " " for byte in blake3(seed).digest(length=count)]
    words[-1] = words[-1][:-1] + "."
    return Answer(words, "stop" if max_tokens is None else "length")


def tool_answer(seed: bytes, function: dict[str, Any], finish_reason: str, max_tokens: int | None) -> Answer:
    """A call of `function` (name, parameters) with valid JSON arguments, cut off only by `max_tokens`."""
    digest = blake3(seed)
    arguments = _value(function.get("parameters") or {"type": "object"}, digest.digest(length=64))
    text = orjson.dumps(arguments).decode()
    pieces = [text[at : at + TOKEN_BYTES] for at in range(0, len(text), TOKEN_BYTES)]
    call = ToolCall(f"chatcmpl-tool-{digest.hexdigest()[:32]}", str(function["name"]))
    if max_tokens is not None and len(pieces) > max_tokens:
        return Answer(pieces[:max_tokens], "length", call)
    return Answer(pieces, finish_reason, call)


def nothing() -> Answer:
    """For pooling requests, which compute a prompt and generate no token."""
    return Answer((), "stop")


def _value(schema: object, entropy: bytes) -> object:
    """A value that a simple JSON schema accepts: enum, const, and the types, with objects filled in full."""
    if not isinstance(schema, dict):
        return _WORDS[entropy[0]]
    if "const" in schema:
        return schema["const"]
    if isinstance(choices := schema.get("enum"), list) and choices:
        return choices[entropy[0] % len(choices)]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list) and kind:
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return {}
        rotated = (entropy[at % 64 :] + entropy[: at % 64] for at in range(len(properties)))
        return {name: _value(inner, part) for (name, inner), part in zip(properties.items(), rotated, strict=True)}
    simple = {
        "integer": entropy[0],
        "number": entropy[0] / 2,
        "boolean": entropy[0] % 2 == 1,
        "array": [],
        "null": None,
    }
    return simple[kind] if isinstance(kind, str) and kind in simple else _WORDS[entropy[0]]
