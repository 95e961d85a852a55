"""From a request to its answers: words, or a text that fits a constraint, the function that they call, and where they
stop.

Each word is drawn from the checksum of all tokens before it, as these decide what an engine decodes greedily. So an
answer goes on in the same words if its beginning is sent back as a part of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from blake3 import blake3

from gateway.simulator import fields
from gateway.simulator.errors import bad_request
from gateway.simulator.prompt import TOKEN_BYTES, WORDS, EnginePrompt, token_ids, token_of
from gateway.simulator.structured import constraint, json_text

DEFAULT_TOKENS = 16
"""The length of an answer if the request does not limit it."""

_MAX_CHOICES = 64
_FIRST_WORDS = [word + " " for word in WORDS]
_FIRST_TOKENS = [token_of(word) for word in _FIRST_WORDS]
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


def text_answer(
    prompt: EnginePrompt, num_tokens: int, finish_reason: str = "length", choice: int = 0
) -> GeneratedAnswer:
    before = crc32(prompt.tokens, crc32(prompt.beside + bytes(choice)))
    words, drawn = [], 0
    for _ in range(num_tokens):
        drawn = before & 0xFF
        words.append(_FIRST_WORDS[drawn])
        before = crc32(_FIRST_TOKENS[drawn], before)
    words[-1] = _LAST_WORDS[drawn]
    return GeneratedAnswer(words, finish_reason)


def _whole_answer(
    text: str, finish_reason: str, max_tokens: int, tool: GeneratedToolCall | None = None
) -> GeneratedAnswer:
    """This text, cut off only by `max_tokens`. Each token has as many whole characters as fit."""
    pieces = [""]
    for char in text:
        if len((pieces[-1] + char).encode()) > TOKEN_BYTES:
            pieces.append("")
        pieces[-1] += char
    return GeneratedAnswer(pieces[:max_tokens], finish_reason if len(pieces) <= max_tokens else "length", tool)


def _tool_answer(seed: bytes, function: dict[str, Any], finish_reason: str, max_tokens: int) -> GeneratedAnswer:
    """A call of `function` (name, parameters) with arguments that its schema accepts."""
    arguments = json_text(function.get("parameters") or {"type": "object"}, seed)
    call = GeneratedToolCall(f"chatcmpl-tool-{blake3(seed).hexdigest()[:32]}", fields.required_text(function, "name"))
    return _whole_answer(arguments, finish_reason, max_tokens, call)


def plan(
    body: dict[str, Any],
    prompts: Sequence[EnginePrompt],
    limits: Sequence[int],
    has_limit: bool,
    function: dict[str, Any] | None = None,
) -> list[GeneratedAnswer]:
    """The answers to a chat or completions request: `n` for each prompt, within the prompt's limit. They call
    `function`, if there is one. Free text has 16 tokens unless the request `has_limit` of its own. Equal prompts have
    the same first answer, whatever `n` is. Raises a 400."""
    n = body.get("n") or 1
    if n * len(prompts) > _MAX_CHOICES:
        raise bad_request(f"n: at most {_MAX_CHOICES} choices in one request", "n")
    least = body.get("min_tokens") or 0
    if least > min(limits):
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={limits[0]}, got {least}.")
    wanted = constraint(body) if function is None else None
    finish_reason = "tool_calls" if body.get("tool_choice") == "required" else "stop"
    answers = []
    for prompt, limit in zip(prompts, limits, strict=True):
        for choice in range(n):
            seed = prompt.seed + bytes(choice)
            if function is not None:
                answers.append(_tool_answer(seed, function, finish_reason, limit))
            elif wanted is not None:
                answers.append(_whole_answer(wanted(seed), "stop", limit))
            elif has_limit or limit < DEFAULT_TOKENS:
                answers.append(text_answer(prompt, limit, choice=choice))
            else:
                answers.append(text_answer(prompt, DEFAULT_TOKENS, "stop", choice))
    return [_stopped(answer, body) for answer in answers] if body.get("stop") or body.get("stop_token_ids") else answers


def forced_function(body: dict[str, Any]) -> dict[str, Any] | None:
    """The function that a chat body's answer must call. Raises a 400 if `tools` and `tool_choice` do not fit
    together."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        raise bad_request("tools must not be an empty array", "tools")
    if choice in (None, "none"):
        return None
    if tools is None:
        raise bad_request("tool_choice needs tools", "tool_choice")
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
    if choice in ("auto", "required"):
        return functions[0] if choice == "required" else None
    named = fields.mapping(fields.as_mapping(choice, "tool_choice"), "function")
    found = next((function for function in functions if function.get("name") == named.get("name")), None)
    if found is None:
        raise bad_request("tool_choice names none of the tools", "tool_choice")
    if any((body.get("structured_outputs") or {}).get(kind) is not None for kind in ("json", "regex", "choice")):
        raise bad_request("either structured outputs or a tool can be asked for, not both", "tool_choice")
    return found


def _stopped(answer: GeneratedAnswer, body: dict[str, Any]) -> GeneratedAnswer:
    """`answer` up to its stop string or stop token, as vLLM's detokenizer ends it.

    The token that completes a stop string is generated and counted. A stream holds text back while it may be part of a
    stop string: as many characters as the longest stop string has, less one.
    """
    given, tokens = body.get("stop") or [], body.get("stop_token_ids") or ()
    strings = [given] if isinstance(given, str) else given
    in_output, least = body.get("include_stop_str_in_output"), body.get("min_tokens") or 0
    behind = 0 if in_output else max(map(len, strings), default=1) - 1
    text, shown_chars = "", 0
    shown: list[str] = []
    for at, piece in enumerate(answer.pieces):
        token = token_ids(token_of(piece))[0]
        if at >= least and token in tokens:
            return _ended(answer, [*shown, text[shown_chars:] + (piece if in_output else "")], token)
        window = len(text)
        text += piece
        stop, start = _found(text, window, strings) if at >= least else ("", -1)
        if stop:
            return _ended(answer, [*shown, text[shown_chars : start + (len(stop) if in_output else 0)]], stop)
        visible = max(shown_chars, len(text) - behind)
        shown.append(text[shown_chars:visible])
        shown_chars = visible
    if shown:
        shown[-1] += text[shown_chars:]
    return replace(answer, shown=shown)


def _found(text: str, window: int, strings: Sequence[str]) -> tuple[str, int]:
    """The first of these stop strings that reaches beyond `window`, and where it begins; empty if there is none."""
    for stop in strings:
        start = text.find(stop, max(0, window - len(stop) + 1))
        if start >= 0:
            return stop, start
    return "", -1


def _ended(answer: GeneratedAnswer, shown: list[str], reason: int | str) -> GeneratedAnswer:
    pieces = answer.pieces[: len(shown)]
    return replace(answer, pieces=pieces, shown=shown, finish_reason="stop", stop_reason=reason)
