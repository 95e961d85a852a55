"""A request of OpenAI's responses as the chat that vLLM 0.33 makes of it. Pure.

vLLM's /v1/responses continues a last item that is incomplete, but does not say whether it has. So the rest is asked for
as a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.relay.progress import NotResumable
from gateway.request.reading.resumable import SAMPLING

_SAME: Final = SAMPLING | {"model", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"}
_OF_TOOLS: Final = ("tool_choice", "parallel_tool_calls")
_OF_TOOL: Final = ("name", "description", "parameters", "strict", "defer_loading")
_UNFINISHED: Final = ("in_progress", "incomplete")


def responses_as_chat(document: dict[str, Any]) -> dict[str, Any]:
    """Raises NotResumable, LookupError, TypeError or AttributeError for what is not turned into a chat here."""
    chat: dict[str, Any] = {name: document[name] for name in _SAME if document.get(name) is not None}
    given, instructions = document["input"], document.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = list[dict[str, Any]]()
    for item in items:
        _add(messages, item)
    chat["messages"] = [*([{"role": "system", "content": instructions}] if instructions else []), *messages]
    if _kind(items[-1]) == "message" and items[-1].get("status") in _UNFINISHED:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if document.get("max_output_tokens") is not None:
        chat["max_tokens"] = document["max_output_tokens"]
    if document.get("tools"):
        chat["tools"] = list(map(_tool, document["tools"]))
        chat |= {name: document[name] for name in _OF_TOOLS if document.get(name) is not None}
    return chat


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Raises NotResumable for what is no function: one that the server runs, a custom one, one in a namespace."""
    if tool["type"] != "function":
        raise NotResumable("tools")
    return {"type": "function", "function": {name: tool[name] for name in _OF_TOOL if tool.get(name) is not None}}


def _kind(item: Mapping[str, Any]) -> Any:
    return item.get("type", "message")


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Text and calls of the assistant that follow each other are one message."""
    kind, last = _kind(item), messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call" and not item.get("namespace"):
        function = {"name": item["name"], "arguments": item["arguments"]}
        if last is None:
            messages.append(last := {"role": "assistant"})
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
    elif kind != "message":
        raise NotResumable(kind)
    elif item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _content(item["content"])})
    else:
        text = item["content"] if isinstance(item["content"], str) else item["content"][0]["text"]
        if last is None or "content" in last:
            messages.append(last := {"role": "assistant"})
        last["content"] = text


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else list(map(_part, content))


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise NotResumable(part["type"])
