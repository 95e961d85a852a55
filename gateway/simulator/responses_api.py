"""/v1/responses: plain, streamed, in the background, or continued from a stored response. Behaves like a vLLM with
VLLM_ENABLE_RESPONSES_API_STORE=1."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.call import Call, Dialect
from gateway.simulator.engine import Generation
from gateway.simulator.errors import RequestRefused, bad_request
from gateway.simulator.logprobs import chat_logprobs
from gateway.simulator.openai_api import PlannedChat, planned_chat
from gateway.simulator.replica import SimReplica, StoredResponse

_MOST_STORED = 1000
_UNFINISHED = ("queued", "in_progress")
_AS_IN_CHAT = (
    "temperature", "top_p", "stop", "stop_token_ids", "include_stop_str_in_output", "structured_outputs",
    "repetition_penalty", "cache_salt", "top_k", "min_p", "logit_bias",
)  # fmt: skip
_INPUT_DETAILS: dict[str, Any] = {"cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []}
_OUTPUT_DETAILS: dict[str, Any] = {
    "reasoning_tokens": 0,
    "tool_output_tokens": 0,
    "output_tokens_per_turn": [],
    "tool_output_tokens_per_turn": [],
}
_LOGPROBS = "message.output_text.logprobs"


async def create_response(call: Call) -> web.StreamResponse:
    body = call.body
    conversation = [*_previous_messages(call), *_input_messages(body)]
    chat = planned_chat(call, _chat_body(body, conversation), body.get("max_output_tokens"))
    background = bool(body.get("background"))
    answering = _Response(call, chat, "queued" if background else "in_progress")
    generation = call.generate([chat.prompt], chat.answers)
    if fields.flag(body, "store", default=True):
        conversation.append(_as_message(chat.answers[0]))
        stored = call.replica.responses
        stored[answering.response["id"]] = StoredResponse(answering.response, conversation, generation)
        if len(stored) > _MOST_STORED:
            stored.popitem(last=False)
    elif background:
        raise bad_request("background can only be used when `store` is true", "background")
    if not background:
        return await call.answer(generation, answering)
    call.replica.tasks.spawn(answering.finish_later(generation), answering.response["id"])
    return await call.respond(answering.response)


async def get_response(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """With `?stream=true` vLLM sends the events of a response that was made with `background` and `stream`, which this
    replica does not make. It begins a stream for any other response, too, and then fails."""
    stored = _stored(replica, request.match_info["response_id"])
    if request.query.get("stream") not in ("true", "True", "1"):
        return web.json_response(stored.response)
    answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    if request.transport is not None:
        request.transport.close()
    return answer


async def cancel_response(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    stored = _stored(replica, request.match_info["response_id"])
    response = stored.response
    if response["status"] not in _UNFINISHED:
        message = "Cannot cancel a synchronous response."
        raise RequestRefused(400, message, "response_id", "invalid_request_error")
    response["status"] = "cancelled"
    if response["background"]:
        stored.generation.close()
    return web.json_response(response)


def _stored(replica: SimReplica, response_id: str) -> StoredResponse:
    stored = replica.responses.get(response_id)
    if stored is None:
        message = f"Response with id '{response_id}' not found."
        raise RequestRefused(404, message, "response_id", "invalid_request_error")
    return stored


def _previous_messages(call: Call) -> list[Any]:
    previous = call.body.get("previous_response_id")
    return _stored(call.replica, previous).messages if previous is not None else []


def _input_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's `input` as chat messages. As in vLLM, text and calls of the assistant that follow each other are
    one message."""
    if isinstance(body["input"], str):
        return [{"role": "user", "content": body["input"]}]
    messages: list[dict[str, Any]] = []
    for at, each in enumerate(body["input"]):
        item = fields.as_mapping(each, f"input.{at}")
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                _add_to_assistant(messages, "content", _first_text(item["content"]))
            case "message":
                messages.append(item)
            case "function_call":
                call = _call_message(item.get("name"), item.get("arguments"), item.get("call_id"))
                if messages and "tool_calls" in messages[-1]:
                    messages[-1]["tool_calls"] += call["tool_calls"]
                else:
                    _add_to_assistant(messages, "tool_calls", call["tool_calls"])
            case "function_call_output":
                output = item.get("output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                continue
            case other:
                raise bad_request(f"input.{at}: unknown item type {other!r}", "input")
    return messages


def _add_to_assistant(messages: list[dict[str, Any]], name: str, value: Any) -> None:
    """Gives the assistant's last message this field, or, if it has one, a message of its own."""
    if not messages or messages[-1]["role"] != "assistant" or name in messages[-1]:
        messages.append({"role": "assistant"})
    messages[-1][name] = value


def _first_text(content: Any) -> Any:
    return content[0]["text"] if isinstance(content, list) and content else content


def _call_message(name: object, arguments: object, call_id: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _as_message(answer: GeneratedAnswer) -> dict[str, Any]:
    if answer.tool is not None:
        return _call_message(answer.tool.name, answer.text, answer.tool.id)
    return {"role": "assistant", "content": answer.text}


def _chat_body(body: dict[str, Any], conversation: list[Any]) -> dict[str, Any]:
    """A request as a chat request."""
    chat = {name: body[name] for name in _AS_IN_CHAT if name in body}
    instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat["messages"] = instructions + conversation
    if tools := body.get("tools"):
        choice = body.get("tool_choice")
        chat["tools"] = [_chat_tool(tool) for tool in tools]
        chat["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    if _LOGPROBS in (body.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs")}
    wanted = (body.get("text") or {}).get("format")
    if wanted is not None:
        chat["response_format"] = {"type": wanted["type"], "json_schema": {"schema": wanted.get("schema")}}
    return chat


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A Responses tool (flat) as a chat tool (its function nested)."""
    told = ("name", "description", "parameters", "strict", "defer_loading")
    function = {key: tool[key] for key in told if key in tool}
    return {"type": "function", "function": function}


def _response_object(call: Call, model: str, status: str) -> dict[str, Any]:
    body = call.body
    return {
        "id": f"resp_{os.urandom(16).hex()}",
        "created_at": int(time.time()),
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature", 1.0),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "background": bool(body.get("background")),
        "max_output_tokens": body.get("max_output_tokens"),
        "previous_response_id": body.get("previous_response_id"),
        "status": status,
        "text": body.get("text"),
        "top_logprobs": body.get("top_logprobs") or 0,
        "usage": None,
    }


class _Response(Dialect):
    """The answer to a request: an object that is completed at the end, and the official SDKs' sequence of events."""

    def __init__(self, call: Call, chat: PlannedChat, status: str) -> None:
        self.response = _response_object(call, chat.model, status)
        self._answers = chat.answers
        self._top_logprobs = chat.top_logprobs
        self._item = self._output_item("in_progress")
        self._sequence_number = 0

    @property
    def _answer(self) -> GeneratedAnswer:
        return self._answers[0]

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Completes the object, which is also the stored one."""
        usage, response = generation.usage(), self.response
        response["output"] = [self._output_item(self._last_status)] if usage.completion_tokens else []
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, **_INPUT_DETAILS},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": _OUTPUT_DETAILS,
            "total_tokens": usage.total_tokens,
        }
        response["status"] = "completed"  # as in vLLM, also if it was aborted
        if self._answer.finish_reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    async def finish_later(self, generation: Generation) -> None:
        """Runs a background response until it is done or cancelled."""
        self.response["status"] = "in_progress"
        await generation.completion()
        if self.response["status"] == "in_progress":
            self.whole(generation)

    def head(self) -> bytes:
        snapshot = {"response": self.response}
        return self._event("response.created", snapshot) + self._event("response.in_progress", snapshot)

    def piece(self, _choice: int, at: int) -> bytes:
        answer = self._answer
        if not answer.pieces[at]:  # it was aborted
            return b""
        opening = b"" if self._is_open else self._open_item()
        text = answer.texts[at]
        if answer.tool is not None:
            return opening + self._item_event("response.function_call_arguments.delta", {"delta": text})
        told = self._told(answer.pieces[at : at + 1], at)
        if not text and not told:
            return opening
        delta = {"content_index": 0, "delta": text, "item_id": self._item["id"], "logprobs": told, "output_index": 0}
        return opening + self._event("response.output_text.delta", delta)

    def tail(self, generation: Generation) -> bytes:
        closing = self._close_item() if self._is_open else b""
        response = self.whole(generation)
        return closing + self._event(f"response.{response['status']}", {"response": response})

    @property
    def _last_status(self) -> str:
        """The status of the item once it has ended."""
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    @property
    def _is_open(self) -> bool:
        """Whether an event of the output item was sent, after the two of the head."""
        return self._sequence_number > 2

    def _open_item(self) -> bytes:
        added = self._event("response.output_item.added", {"output_index": 0, "item": self._item})
        if self._answer.tool is not None:
            return added
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return added + self._item_event("response.content_part.added", {"content_index": 0, "part": part})

    def _close_item(self) -> bytes:
        answer, item = self._answer, self._output_item(self._last_status)
        if answer.tool is not None:
            arguments = {"arguments": answer.text, "name": answer.tool.name}
            closing = self._item_event("response.function_call_arguments.done", arguments)
        else:
            done = {"content_index": 0, "text": answer.text, "logprobs": []}
            closing = self._item_event("response.output_text.done", done)
            part = {"content_index": 0, "part": item["content"][0]}
            closing += self._item_event("response.content_part.done", part)
        return closing + self._event("response.output_item.done", {"output_index": 0, "item": item})

    def _output_item(self, status: str) -> dict[str, Any]:
        """The only output item of a response: a message or a function call, empty while in progress."""
        answer, response_id = self._answer, self.response["id"]
        has_ended = status != "in_progress"
        text = answer.text if has_ended else ""
        if answer.tool is not None:
            item = {"id": response_id.replace("resp_", "fc_"), "type": "function_call", "call_id": answer.tool.id}
            return {**item, "name": answer.tool.name, "arguments": text, "status": status}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._told(answer.pieces) or None}
        item = {"id": response_id.replace("resp_", "msg_"), "type": "message", "role": "assistant"}
        return {**item, "content": [part] if has_ended else [], "status": status}

    def _told(self, pieces: Sequence[str], first: int = 0) -> list[Any]:
        """The log probabilities of these tokens, if they are wanted."""
        if self._top_logprobs is None:
            return []
        told: list[Any] = chat_logprobs(pieces, self._top_logprobs, first)["content"]
        return told

    def _item_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, {"output_index": 0, "item_id": self._item["id"], **fields})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        """As in vLLM, its number and its kind are behind the other fields."""
        self._sequence_number += 1
        told = {**fields, "sequence_number": self._sequence_number - 1, "type": kind}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(told))
