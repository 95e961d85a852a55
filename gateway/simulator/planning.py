"""From a request to its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.simulator import fields
from gateway.simulator.answers import DEFAULT_TOKENS, GeneratedAnswer, constrained_answer, text_answer, tool_answer
from gateway.simulator.errors import bad_request, bad_value
from gateway.simulator.prompt import EnginePrompt
from gateway.simulator.sampling import TokenLimit
from gateway.simulator.stopping import stopped, stops
from gateway.simulator.structured import constraint

_MAX_CHOICES = 64
_NO_TOOL_FORCED = (None, "auto", "none")
_USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'


def plan(body: dict[str, Any], prompts: Sequence[EnginePrompt], limits: Sequence[TokenLimit]) -> list[GeneratedAnswer]:
    """The answers to a chat or completions request: `n` for each prompt, within the prompt's limit. Equal prompts have
    the same first answer, whatever `n` is. Raises a 400."""
    n = body.get("n") or 1
    if n * len(prompts) > _MAX_CHOICES:
        raise bad_request(f"n: at most {_MAX_CHOICES} choices in one request", "n")
    least = body.get("min_tokens") or 0
    if least > min(limit.max_tokens for limit in limits):
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={limits[0].max_tokens}, got {least}.")
    seeds = [
        (prompt.seed + bytes(choice), limit)
        for prompt, limit in zip(prompts, limits, strict=True)
        for choice in range(n)
    ]
    answers = _unstopped(body, seeds)
    ends = stops(body)
    return answers if ends is None else [stopped(answer, ends) for answer in answers]


def _unstopped(body: dict[str, Any], seeds: Sequence[tuple[bytes, TokenLimit]]) -> list[GeneratedAnswer]:
    """A tool call if the request forces one, else a constrained text, else free text."""
    choice = body.get("tool_choice")
    if choice not in _NO_TOOL_FORCED:
        function = _forced_function(body)
        finish_reason = "tool_calls" if choice == "required" else "stop"
        return [tool_answer(seed, function, finish_reason, limit.max_tokens) for seed, limit in seeds]
    wanted = constraint(body)
    if wanted is not None:
        return [constrained_answer(seed, wanted, limit.max_tokens) for seed, limit in seeds]
    return [_text_answer(seed, limit) for seed, limit in seeds]


def _text_answer(seed: bytes, limit: TokenLimit) -> GeneratedAnswer:
    """As many words as the request asks for, or 16."""
    if limit.asked or limit.max_tokens < DEFAULT_TOKENS:
        return text_answer(seed, limit.max_tokens)
    return text_answer(seed, DEFAULT_TOKENS, "stop")


def check_tools(body: dict[str, Any]) -> None:
    """Raises a 400 if a chat body's `tools` and `tool_choice` do not fit together."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        hint = "Either provide at least one tool or omit the field entirely."
        raise bad_value(f"`tools` must not be an empty array. {hint}", "tools")
    if choice in (None, "none"):
        return
    if tools is None:
        raise bad_value("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice not in ("auto", "required"):
        _check_named(choice, tools)
        if any((body.get("structured_outputs") or {}).get(kind) is not None for kind in ("json", "regex", "choice")):
            raise bad_request("You can only either use constraints for structured outputs or tools, not both.")


def _check_named(choice: object, tools: Sequence[dict[str, Any]]) -> None:
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
    if not any(tool["function"].get("name") == name for tool in tools):
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise bad_value(message, "tool_choice")


def _forced_function(body: dict[str, Any]) -> dict[str, Any]:
    """The named function, or the first one."""
    choice = body["tool_choice"]
    name = None if choice == "required" else fields.mapping(fields.as_mapping(choice, "tool_choice"), "function")
    for tool in fields.sequence(body, "tools"):
        function = fields.mapping(fields.as_mapping(tool, "tools"), "function")
        if name is None or function.get("name") == name.get("name"):
            fields.required_text(function, "name")
            return function
    raise bad_request("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
