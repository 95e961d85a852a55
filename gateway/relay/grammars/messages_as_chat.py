"""A request of Anthropic's messages as the chat that vLLM 0.33 makes of it. Pure.

vLLM's /v1/messages begins a new answer behind a last message of the assistant, so the rest is asked for as a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

from gateway.relay.progress import NotResumable

_SAME: Final = ("model", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "vllm_xargs")
_BILLING: Final = "x-anthropic-billing-header"
"""How a text of a system prompt begins that vLLM leaves out: it differs in each request."""


def messages_as_chat(document: dict[str, Any], *, merges_system: bool = False) -> dict[str, Any]:
    """`merges_system`: the system's messages between others go to the first one, as templates want it that refuse them
    there. Raises NotResumable, LookupError, TypeError or AttributeError for what is not turned into a chat here."""
    chat: dict[str, Any] = {name: document[name] for name in _SAME if document.get(name) is not None}
    system, messages = document.get("system") or [], document["messages"]
    texts = [system] if isinstance(system, str) else _system_texts(system)
    if merges_system:
        texts += chain.from_iterable(_system_texts(each["content"]) for each in messages if has_system_role(each))
        messages = [each for each in messages if not has_system_role(each)]
    chat["messages"] = [*_system(texts), *chain.from_iterable(map(_messages, messages))]
    chat["max_tokens"] = document["max_tokens"]
    if document.get("stop_sequences"):
        chat["stop"] = document["stop_sequences"]
    effort = (document.get("output_config") or {}).get("effort")
    if (document.get("thinking") or {}).get("type") == "disabled":
        effort = "none"
    if effort is not None:
        chat["reasoning_effort"] = effort
    if document.get("tools"):
        choice = document.get("tool_choice") or {"type": "auto"}
        chat["tools"], chat["tool_choice"] = list(map(_tool, document["tools"])), choice["type"]
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return chat


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    told = ("name", "description", "strict", "defer_loading")
    function = {name: tool[name] for name in told if tool.get(name) is not None}
    schema = tool["input_schema"]
    function["parameters"] = {**schema, "type": schema.get("type", "object")}
    return {"type": "function", "function": function}


def has_system_role(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _system(texts: list[str]) -> Iterator[dict[str, Any]]:
    if text := "".join(texts):
        yield {"role": "system", "content": text}


def _system_texts(content: str | list[Any]) -> list[str]:
    """Raises NotResumable for what is no text, like a change of the tools."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if others := [block["type"] for block in blocks if block["type"] != "text"]:
        raise NotResumable(others[0])
    return [block["text"] for block in blocks if not block["text"].startswith(_BILLING)]


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of tools in a message are messages of their own, and come before the rest of it."""
    role, content = message["role"], message["content"]
    if role == "system":
        yield from _system(_system_texts(content))
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts, calls = list[dict[str, Any]](), list[dict[str, Any]]()
    for block in content:
        kind = block["type"]
        if kind == "tool_result" and role == "user":
            yield from _result(block)
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind != "text" or block["text"]:
            parts.append(_part(block))
    told = {"tool_calls": calls} if calls else {}
    if parts:
        told["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if parts or role == "assistant":
        yield {"role": role, **told}


def _result(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The result of a tool: its texts, and its images as a message of the user."""
    content = block.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(map(_part, content))
    texts = [part["text"] for part in parts if part["type"] == "text"]
    yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": "\n".join(texts)}
    if images := [part for part in parts if part["type"] != "text"]:
        yield {"role": "user", "content": images}


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Raises NotResumable for what is neither text nor an image, like thoughts."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] != "image":
        raise NotResumable(block["type"])
    source = block["source"]
    data = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    url = source.get("url", "") if source.get("type") == "url" else data
    return {"type": "image_url", "image_url": {"url": url}}
