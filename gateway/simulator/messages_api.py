"""/v1/messages in Anthropic's shape. As in vLLM, the request is translated to a chat request first, so that a
conversation has the same prompt here as on /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.call import Call
from gateway.simulator.generation import Generation
from gateway.simulator.openai_api import chat_prompt
from gateway.simulator.planning import check_tools, plan
from gateway.simulator.sampling import check_sampling

_SAMPLING = ("temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs")


async def messages(call: Call) -> web.StreamResponse:
    model, lora = call.replica.resolve_model(call.body["model"])
    chat = _chat_body(call.body)
    check_sampling(chat)
    check_tools(chat)
    prompt = chat_prompt(call.replica, chat, lora)
    limit = call.replica.token_limit(prompt, call.body["max_tokens"], "max_completion_tokens")
    answers = plan(chat, [prompt], [limit])
    stream = fields.flag(call.body, "stream")
    generation = call.generate([prompt], answers, stream)
    message = _message_object(call, model)
    if stream:
        return await call.stream(generation, _MessageEvents(message, answers, prompt.num_tokens))
    await call.complete(generation)
    (answer,) = answers
    message["content"] = [_content_block(answer)]
    message |= _stop(answer)
    message["usage"] = _usage(generation)
    return await call.respond(message)


async def count_tokens(call: Call) -> web.StreamResponse:
    _, lora = call.replica.resolve_model(call.body["model"])
    prompt = chat_prompt(call.replica, _chat_body(call.body), lora)
    return await call.respond({"input_tokens": prompt.num_tokens})


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Translates a Messages request to a chat request, as vLLM does."""
    chat: dict[str, Any] = {name: body[name] for name in _SAMPLING if name in body}
    chat["messages"] = []
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if schema := ((body.get("output_config") or {}).get("format") or {}).get("schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    system = body.get("system")
    if isinstance(system, list):
        system = "".join(fields.required_text(fields.as_mapping(block, "system"), "text") for block in system)
    if system:
        chat["messages"].append({"role": "system", "content": system})
    for at, message in enumerate(fields.sequence(body, "messages")):
        chat["messages"] += _chat_messages(fields.as_mapping(message, f"messages.{at}"))
    if tools := fields.sequence(body, "tools"):
        chat["tools"] = [_chat_tool(tool) for tool in tools]
        chat["tool_choice"] = _chat_tool_choice(fields.mapping(body, "tool_choice"))
    return chat


def _chat_tool_choice(choice: dict[str, Any]) -> object:
    match choice.get("type", "auto"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            return kind


def _chat_tool(tool: object) -> dict[str, Any]:
    given = fields.as_mapping(tool, "tools")
    function = {
        "name": fields.required_text(given, "name"),
        "description": given.get("description"),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One Anthropic message as chat messages. Its tool results come first, each as a separate message."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [message]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for given in fields.sequence(message, "content"):
        block = fields.as_mapping(given, "content")
        match block.get("type"):
            case "image":
                parts.append(_image_part(fields.mapping(block, "source"), block.get("uuid")))
            case "tool_use":
                arguments = orjson.dumps(fields.mapping(block, "input")).decode()
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                result = block.get("content") or ""
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            case _:
                parts.append(block)
    if not parts and not calls:
        return results
    return [*results, {"role": message.get("role"), "content": parts, "tool_calls": calls}]


def _image_part(source: dict[str, Any], uuid: object) -> dict[str, Any]:
    if source.get("type") == "url":
        url = fields.text(source, "url")
    else:
        data = fields.required_text(source, "data")
        url = f"data:{fields.text(source, 'media_type') or 'image/png'};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}, "uuid": uuid}


def _message_object(call: Call, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.request_id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": None,
    }


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
    if answer.finish_reason == "abort":
        return {"stop_reason": None, "stop_sequence": None}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    return {"stop_reason": "end_turn" if answer.tool is None else "tool_use", "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, int]:
    """The token counts. As in vLLM, this API has no cached tokens."""
    usage = generation.usage()
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}


class _MessageEvents:
    def __init__(self, message: dict[str, Any], answers: list[GeneratedAnswer], input_tokens: int) -> None:
        self._message = {**message, "usage": {"input_tokens": input_tokens, "output_tokens": 0}}
        self._answers = answers
        self._opened = False

    @property
    def _answer(self) -> GeneratedAnswer:
        return self._answers[0]

    def head(self) -> bytes:
        return b""

    def piece(self, choice: int, at: int) -> bytes:
        opening = b"" if self._opened else self._open()
        self._opened = True
        text = self._answer.texts[at]
        if not text:
            return opening
        delta = {"type": "text_delta", "text": text}
        if self._answer.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return opening + _event("content_block_delta", {"index": 0, "delta": delta})

    def tail(self, generation: Generation) -> bytes:
        return (
            _event("content_block_stop", {"index": 0})
            + _event("message_delta", {"delta": _stop(self._answer), "usage": _usage(generation)})
            + _event("message_stop", {})
        )

    def _open(self) -> bytes:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self._answer.tool is not None:
            block = {**_content_block(self._answer), "input": {}}
        return _event("message_start", {"message": self._message}) + _event(
            "content_block_start", {"index": 0, "content_block": block}
        )


def _event(kind: str, body: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **body}) + b"\n\n"
