"""From a request to its answers: their texts, the function that they call, and where they stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.simulator.answers import DEFAULT_TOKENS, GeneratedAnswer, text_answer, tool_answer, whole_answer
from gateway.simulator.errors import bad_request, bad_value
from gateway.simulator.prompt import EnginePrompt, token_ids, token_of
from gateway.simulator.sampling import TokenLimit
from gateway.simulator.structured import constraint

_MAX_CHOICES = 64
_USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'


def plan(
    body: dict[str, Any],
    prompts: Sequence[EnginePrompt],
    limits: Sequence[TokenLimit],
    function: dict[str, Any] | None = None,
) -> list[GeneratedAnswer]:
    """The answers to a chat or completions request: `n` for each prompt, within the prompt's limit. They call
    `function`, if there is one. Equal prompts have the same first answer, whatever `n` is. Raises a 400."""
    n = body.get("n") or 1
    if n * len(prompts) > _MAX_CHOICES:
        raise bad_request(f"n: at most {_MAX_CHOICES} choices in one request", "n")
    least = body.get("min_tokens") or 0
    if least > min(limit.max_tokens for limit in limits):
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={limits[0].max_tokens}, got {least}.")
    wanted = constraint(body) if function is None else None
    finish_reason = "tool_calls" if body.get("tool_choice") == "required" else "stop"
    answers = []
    for prompt, limit in zip(prompts, limits, strict=True):
        for choice in range(n):
            seed = prompt.seed + bytes(choice)
            if function is not None:
                answers.append(tool_answer(seed, function, finish_reason, limit.max_tokens))
            elif wanted is not None:
                answers.append(whole_answer(wanted(seed), "stop", limit.max_tokens))
            elif limit.asked or limit.max_tokens < DEFAULT_TOKENS:
                answers.append(text_answer(seed, limit.max_tokens))
            else:
                answers.append(text_answer(seed, DEFAULT_TOKENS, "stop"))
    return [_stopped(answer, body) for answer in answers] if body.get("stop") or body.get("stop_token_ids") else answers


def forced_function(body: dict[str, Any]) -> dict[str, Any] | None:
    """The function that a chat body's answer must call. Raises a 400 if `tools` and `tool_choice` do not fit
    together."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        hint = "Either provide at least one tool or omit the field entirely."
        raise bad_value(f"`tools` must not be an empty array. {hint}", "tools")
    if choice in (None, "none"):
        return None
    if tools is None:
        raise bad_value("When using `tool_choice`, `tools` must be set.", "tool_choice")
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
    if choice in ("auto", "required"):
        return functions[0] if choice == "required" else None
    name = _name_in(choice)
    found = next((function for function in functions if function.get("name") == name), None)
    if found is None:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise bad_value(message, "tool_choice")
    if any((body.get("structured_outputs") or {}).get(kind) is not None for kind in ("json", "regex", "choice")):
        raise bad_request("You can only either use constraints for structured outputs or tools, not both.")
    return found


def _name_in(choice: object) -> str:
    if not isinstance(choice, dict):
        allowed = 'Only named tools, "none", "auto" or "required" are supported.'
        raise bad_value(f"Invalid value for `tool_choice`: {choice}! {allowed}", "tool_choice")
    function = choice.get("function")
    if not isinstance(function, dict):
        message = f"Invalid value for `function`: `{function}` in `tool_choice`! {_USAGE}"
        raise bad_value(message, "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        message = f"Invalid `name` in `function`: `{name}` in `tool_choice`! {_USAGE}"
        raise bad_value(message, "tool_choice.function.name")
    return name


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
