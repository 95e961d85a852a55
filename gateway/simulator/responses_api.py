"""/v1/responses: plain, streamed, in the background, or continued from a stored response. Behaves like a vLLM with
VLLM_ENABLE_RESPONSES_API_STORE=1."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.call import Call
from gateway.simulator.chat_template import render_chat
from gateway.simulator.errors import RequestRefused, bad_request
from gateway.simulator.generation import Generation, SimUsage
from gateway.simulator.logprobs import Logprobs, chat_logprobs
from gateway.simulator.planning import plan
from gateway.simulator.replica import SimReplica, StoredResponse
from gateway.simulator.response_events import ResponseEvents, output_item
from gateway.simulator.sampling import check_sampling

_UNFINISHED = ("queued", "in_progress")
_AS_IN_CHAT = (
    "temperature", "top_p", "stop", "stop_token_ids", "include_stop_str_in_output", "structured_outputs",
    "repetition_penalty", "cache_salt", "top_k", "min_p", "logit_bias",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


async def create_response(call: Call) -> web.StreamResponse:
    body = call.body
    model, lora = call.replica.resolve_model(body.get("model"))
    conversation = [*_previous_messages(call), *_input_messages(body)]
    instructions = body.get("instructions")
    chat = _chat_body(body)
    check_sampling(chat)
    logprobs = chat_logprobs(chat)
    prompt = render_chat(
        [{"role": "system", "content": instructions}, *conversation] if instructions else conversation,
        call.replica.images,
        tools=chat["tools"],
        lora=lora,
        cache_salt=body.get("cache_salt"),
    )
    limit = call.replica.token_limit(prompt, body.get("max_output_tokens"), "max_output_tokens")
    answers = plan(chat, [prompt], [limit])
    stream, background = fields.flag(body, "stream"), fields.flag(body, "background")
    generation = call.generate([prompt], answers, stream)

    response = _response_object(call, model, "queued" if background else "in_progress")
    finishing = _Finishing(call.replica, response, answers, logprobs)
    if fields.flag(body, "store", default=True):
        call.replica.remember_response(StoredResponse(response, [*conversation, _as_message(answers[0])], generation))
    elif background:
        raise bad_request("background can only be used when `store` is true", "background")
    if background:
        call.replica.tasks.spawn(_finish_later(finishing, generation), response["id"])
        return await call.respond(response)
    if stream:
        return await call.stream(generation, _FinishingEvents(finishing))
    await call.complete(generation)
    finishing.finish(generation.usage())
    return await call.respond(response)


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
    previous = fields.text(call.body, "previous_response_id")
    return _stored(call.replica, previous).messages if previous is not None else []


def _input_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's `input` as chat messages."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given is None:
        raise bad_request("input: Field required", "input")
    messages: list[dict[str, Any]] = []
    for at, each in enumerate(fields.sequence(body, "input")):
        item = fields.as_mapping(each, f"input.{at}")
        match item.get("type", "message"):
            case "message":
                messages.append(item)
            case "function_call":
                messages.append(_call_message(item.get("name"), item.get("arguments"), item.get("call_id")))
            case "function_call_output":
                output = item.get("output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                continue
            case other:
                raise bad_request(f"input.{at}: unknown item type {other!r}", "input")
    return messages


def _call_message(name: object, arguments: object, call_id: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _as_message(answer: GeneratedAnswer) -> dict[str, Any]:
    if answer.tool is not None:
        return _call_message(answer.tool.name, answer.text, answer.tool.id)
    return {"role": "assistant", "content": answer.text}


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """A request's options for its answer, as those of a chat request."""
    chat = {name: body[name] for name in _AS_IN_CHAT if name in body}
    chat["tools"] = [_chat_tool(tool) for tool in fields.sequence(body, "tools")]
    chat["tool_choice"] = _chat_tool_choice(body.get("tool_choice"))
    if _LOGPROBS in (body.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs")}
    wanted = (body.get("text") or {}).get("format")
    if wanted is not None:
        chat["response_format"] = {"type": wanted["type"], "json_schema": {"schema": wanted.get("schema")}}
    return chat


def _chat_tool(tool: object) -> dict[str, Any]:
    """A Responses tool (flat) as a chat tool (its function nested)."""
    flat = fields.as_mapping(tool, "tools")
    function = {key: flat[key] for key in ("name", "description", "parameters") if key in flat}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: object) -> object:
    return {"type": "function", "function": choice} if isinstance(choice, dict) else choice


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
        "tools": fields.sequence(body, "tools"),
        "top_p": body.get("top_p", 1.0),
        "background": fields.flag(body, "background"),
        "max_output_tokens": body.get("max_output_tokens"),
        "previous_response_id": body.get("previous_response_id"),
        "status": status,
        "text": body.get("text"),
        "top_logprobs": body.get("top_logprobs") or 0,
        "usage": None,
    }


@dataclass(frozen=True, slots=True)
class _Finishing:
    """Completes a response object, and the stored response."""

    replica: SimReplica
    response: dict[str, Any]
    answers: list[GeneratedAnswer]
    logprobs: Logprobs | None

    def finish(self, usage: SimUsage) -> None:
        details = usage.cached_tokens if self.replica.settings.prompt_tokens_details else 0
        response = self.response
        (answer,) = self.answers
        item = output_item(response["id"], answer, "completed", self.logprobs)
        response["output"] = [item] if usage.completion_tokens else []
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": details},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        response["status"] = "completed"  # as in vLLM, also if it was aborted
        if answer.finish_reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}


async def _finish_later(finishing: _Finishing, generation: Generation) -> None:
    """Runs a background response until it is done or cancelled."""
    finishing.response["status"] = "in_progress"
    await generation.completion()
    if finishing.response["status"] == "in_progress":
        finishing.finish(generation.usage())


class _FinishingEvents(ResponseEvents):
    """The event stream of a response. Its last event has the finished object."""

    def __init__(self, finishing: _Finishing) -> None:
        super().__init__(finishing.response, finishing.answers, finishing.logprobs)
        self._finishing = finishing

    def tail(self, generation: Generation) -> bytes:
        self._finishing.finish(generation.usage())
        return super().tail(generation)
