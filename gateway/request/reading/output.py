"""How much an engine generates for a request, at most. Pure.

Each of vLLM's endpoints reads fields of its own and ignores those of the others. Here they are read in the same way: a
limit that the engine ignores would let a client pay for less than it gets. Numbers are read as by vLLM's pydantic: "5",
5.0 and true are some, too. A value that vLLM refuses limits nothing here; the answer to such a request is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.endpoints import Endpoint

_MAX_OUTPUT_TOKENS = 10_000_000
"""A limit beyond this says nothing about the answer."""
_COMPLETION_TOKENS = 16
"""What vLLM takes if a completion has no `max_tokens`. With null, it has no limit."""
_TOOLS_OF_CLIENTS = ("function", "custom")
"""Clients run tools of these types. The server runs all others."""


def output_of(endpoint: Endpoint, document: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many choices the engine generates, and the most tokens of all of them together; None if nothing limits
    these. Beams of a search count as choices."""
    choices = _choices(endpoint, document)
    if not endpoint.output_limits:
        return choices, None if endpoint.output_limits is None else 0
    if endpoint.stores_responses and runs_tools(document):
        return choices, None  # the limit is that of each turn between two calls of tools
    default = _COMPLETION_TOKENS if endpoint.prompt == "completion" else None
    limit: int | None = None
    for name in endpoint.output_limits:
        value = document.get(name, default)
        if value is None:
            continue
        number = whole_number(value)
        limit = limit if number is None else number
        if limit:  # older versions take a zero for a field that is not set
            break
    if limit is None or limit < 0:
        return choices, None
    found = choices * max(1, limit)  # with 0, a completion only echoes its prompt; one token is generated all the same
    return choices, found if found <= _MAX_OUTPUT_TOKENS else None


def prompts_of(document: Mapping[str, Any]) -> int:
    """How many prompts a completion has. Those in `prompt_embeds` come beside those in `prompt`."""
    return sum(_length(document.get(name)) for name in ("prompt", "prompt_embeds"))


def runs_tools(document: Mapping[str, Any]) -> bool:
    """Whether a response may use tools that the server runs."""
    tools = document.get("tools")
    return isinstance(tools, list) and not all(
        isinstance(tool, dict) and tool.get("type") in _TOOLS_OF_CLIENTS for tool in tools
    )


def _choices(endpoint: Endpoint, document: Mapping[str, Any]) -> int:
    """Of the paths below, only chats and completions have `n`; a batch of chats accepts no other value than 1."""
    if endpoint.prompt not in ("chat", "completion"):
        conversations = document.get("messages")
        return len(conversations) if endpoint.prompt is None and isinstance(conversations, list) else 1
    wanted = document.get("n")
    each = 1 if wanted is None else max(1, whole_number(wanted) or 1)
    return each * max(1, prompts_of(document)) if endpoint.prompt == "completion" else each


def _length(prompts: Any) -> int:
    """A list of numbers is one prompt of token ids."""
    if isinstance(prompts, list):
        return 1 if prompts and isinstance(prompts[0], int) else len(prompts)
    return 1 if prompts else 0


def whole_number(value: Any) -> int | None:
    """The number that vLLM reads; None if it is none. (Imports of pydantic would slow the start of workers.)"""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        number, _, zeros = value.partition(".") if isinstance(value, str) else ("", "", "")
        return None if zeros.strip().strip("0") else int(number)
    except ValueError:
        return None
