"""Chat prompts, as their tests write and read them."""

from __future__ import annotations

from typing import Any

from gateway.prompt import Prompt, PromptLimits, read_prompt

CHAT = "/v1/chat/completions"


def read(body: dict[str, Any], path: str = CHAT, **engine: Any) -> Prompt:
    named = {"root_model": "base", "adapter": None, "cache_salt": None} | engine
    return read_prompt(path, body, limits=PromptLimits(10**8), **named)


def chat(*messages: Any, **other: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **other}


def user(content: Any, **other: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **other}
