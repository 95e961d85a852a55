"""/v1/messages in Anthropic's shape. As in vLLM, the request is translated to a chat request first, so that a
conversation has the same prompt here as on /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import orjson
from aiohttp import web

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.call import Call, Dialect, event
from gateway.simulator.engine import Generation
from gateway.simulator.openai_api import PlannedChat, chat_prompt, planned_chat

_AS_IN_CHAT = ("temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs")


async def messages(call: Call) -> web.StreamResponse:
    chat = planned_chat(call, _chat_body(call.body), call.body["max_tokens"])
    return await call.answer(call.generate([chat.prompt], chat.answers), _Message(call, chat))


async def count_tokens(call: Call) -> web.StreamResponse:
    _, lora = call.replica.resolve_model(call.body["model"])
    prompt = chat_prompt(call.replica, _chat_body(call.body), lora)
    return await call.respond({"input_tokens": prompt.num_tokens})


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Translates a Messages request to a chat request, as vLLM does."""
    chat: dict[str, Any] = {name: body[name] for name in _AS_IN_CHAT if name in body}
    chat["messages"] = []
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if schema := ((body.get("output_config") or {}).get("format") or {}).get("schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    system = body.get("system") or ""
    if system := system if isinstance(system, str) else _system_text(system):
        chat["messages"].append({"role": "system", "content": system})
    for message in body["messages"]:
        chat["messages"] += _chat_messages(message)
    if body.get("tools"):
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
        choice = body.get("tool_choice") or {"type": "auto"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(choice["type"], choice["type"])
    return chat


def _system_text(content: Any) -> str:
    texts = [content] if isinstance(content, str) else [fields.required_text(block, "text") for block in content]
    return "".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    told = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": {**told, "parameters": {**schema, "type": schema.get("type", "object")}}}


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One Anthropic message as chat messages. Its tool results come first, each as a separate message."""
    role = message["role"]
    if role == "system":
        text = _system_text(message["content"])
        return [{"role": role, "content": text}] if text else []
    if isinstance(message["content"], str):
        return [message]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message["content"]:
        match block.get("type"):
            case "text" if not block.get("text"):
                continue
            case "image":
                parts.append(_image_part(fields.mapping(block, "source"), block.get("uuid")))
            case "tool_use":
                arguments = json.dumps(fields.mapping(block, "input"))
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                results += _result_messages(block)
            case _:
                parts.append(block)
    told: dict[str, Any] = {"role": role, **({"tool_calls": calls} if calls else {})}
    if parts:
        told["content"] = parts[0]["text"] if [part["type"] for part in parts] == ["text"] else parts
    return [*results, told] if parts or role == "assistant" else results


def _result_messages(block: dict[str, Any]) -> list[dict[str, Any]]:
    """What a tool returned: its texts, and its images in a message of the user."""
    content = block.get("content") or ""
    images: list[dict[str, Any]] = []
    if isinstance(content, list):
        images = [_image_part(fields.mapping(part, "source"), None) for part in content if part["type"] == "image"]
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    told = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    return [told, *([{"role": "user", "content": images}] if images else [])]


def _image_part(source: dict[str, Any], uuid: object) -> dict[str, Any]:
    if source.get("type") == "url":
        url = fields.text(source, "url")
    else:
        data = fields.required_text(source, "data")
        url = f"data:{fields.text(source, 'media_type') or 'image/png'};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}, "uuid": uuid}


class _Message(Dialect):
    """The answer to a request: a message, or its events."""

    def __init__(self, call: Call, chat: PlannedChat) -> None:
        self._id, self._call = f"chatcmpl-{call.request_id}", call
        self._chat = chat
        self._opened = False

    @property
    def _answer(self) -> GeneratedAnswer:
        return self._chat.answers[0]

    def whole(self, generation: Generation) -> dict[str, Any]:
        answer = self._answer
        message = self._message([_content_block(answer)], _stop(answer), _usage(generation))
        return {**message, "kv_transfer_params": self._call.reference(generation)}

    def piece(self, _choice: int, at: int) -> bytes:
        opening = b"" if self._opened else self._opening()
        self._opened = True
        text = self._answer.texts[at]
        if not text:
            return opening
        delta = {"type": "text_delta", "text": text}
        if self._answer.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return opening + event("content_block_delta", {"delta": delta, "index": 0})

    def tail(self, generation: Generation) -> bytes:
        return (
            event("content_block_stop", {"index": 0})
            + event("message_delta", {"delta": _stop(self._answer), "usage": _usage(generation)})
            + event("message_stop", {})
        )

    def _opening(self) -> bytes:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self._answer.tool is not None:
            block = {**_content_block(self._answer), "input": {}}
        usage = {"input_tokens": self._chat.prompt.num_tokens, "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return event("message_start", {"message": message}) + event(
            "content_block_start", {"content_block": block, "index": 0}
        )

    def _message(self, content: list[Any], stop: dict[str, str | None], usage: dict[str, int]) -> dict[str, Any]:
        message = {"id": self._id, "type": "message", "role": "assistant", "content": content}
        return {**message, "model": self._chat.model, **stop, "usage": usage}


def _content_block(answer: GeneratedAnswer) -> dict[str, Any]:
    if answer.tool is None:
        return {"type": "text", "text": answer.text}
    try:
        arguments = orjson.loads(answer.text)
    except orjson.JSONDecodeError:  # cut off by max_tokens
        arguments = {}
    return {"type": "tool_use", "id": answer.tool.id, "name": answer.tool.name, "input": arguments}


def _stop(answer: GeneratedAnswer) -> dict[str, str | None]:
    """Why an answer ends, and at which stop sequence. As in vLLM, other reasons are none."""
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reasons = {"abort": None, "length": "max_tokens"}
    usual = "end_turn" if answer.tool is None else "tool_use"
    return {"stop_reason": reasons.get(answer.finish_reason, usual), "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, int]:
    """The token counts. As in vLLM, this API has no cached tokens."""
    usage = generation.usage()
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
