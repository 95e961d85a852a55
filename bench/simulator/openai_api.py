"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from bench.simulator import fields
from bench.simulator.answers import DEFAULT_TOKENS, Answer, text_answer, tool_answer
from bench.simulator.call import Call
from bench.simulator.chat_template import render_chat
from bench.simulator.errors import bad_request
from bench.simulator.generation import Generation, Usage
from bench.simulator.prompt import Prompt, PromptBuilder
from bench.simulator.replica import Replica

_MAX_CHOICES = 64


async def chat_completions(call: Call) -> web.StreamResponse:
    model, lora = call.replica.resolve_model(fields.text(call.body, "model"))
    prompt = chat_prompt(call.replica, call.body, lora)
    limit = fields.integer(call.body, "max_completion_tokens", minimum=1)
    limit = limit if limit is not None else fields.integer(call.body, "max_tokens", minimum=1)
    seeds = _choice_seeds(call.body, [prompt])
    answers = chat_answers(call.body, seeds, limit)
    stream, include_usage = _stream_options(call.body)
    generation = call.generate([prompt], answers, stream)
    if stream:
        chunks = _ChatChunks(call, model, answers, include_usage)
        return await call.stream(generation, chunks)
    await call.complete(generation)
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": None,
        }
        for index, answer in enumerate(answers)
    ]
    return await call.respond(
        {
            "id": f"chatcmpl-{call.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage_body(call.replica, generation.usage()),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
    )


async def completions(call: Call) -> web.StreamResponse:
    model, lora = call.replica.resolve_model(fields.text(call.body, "model"))
    cache_salt = fields.text(call.body, "cache_salt")
    prompts = [text_prompt(each, lora, cache_salt) for each in _prompt_list(call.body.get("prompt"))]
    # Unlike for chat, vLLM has a default here: the answer is cut at 16 tokens.
    limit = fields.integer(call.body, "max_tokens", minimum=1) or DEFAULT_TOKENS
    answers = [text_answer(seed, limit) for seed in _choice_seeds(call.body, prompts)]
    stream, include_usage = _stream_options(call.body)
    generation = call.generate(prompts, answers, stream)
    if stream:
        return await call.stream(generation, _CompletionChunks(call, model, include_usage))
    await call.complete(generation)
    choices = [
        {
            "index": index,
            "text": "".join(answer.pieces),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": None,
            "prompt_logprobs": None,
        }
        for index, answer in enumerate(answers)
    ]
    return await call.respond(
        {
            "id": f"cmpl-{call.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage_body(call.replica, generation.usage()),
            "kv_transfer_params": None,
        }
    )


def chat_prompt(replica: Replica, body: dict[str, Any], lora: str | None) -> Prompt:
    """The prompt of a body with chat `messages`."""
    return render_chat(
        fields.sequence(body, "messages"),
        replica.images,
        tools=fields.sequence(body, "tools") if body.get("tool_choice") != "none" else (),
        template_kwargs=fields.mapping(body, "chat_template_kwargs"),
        generation_prompt=fields.flag(body, "add_generation_prompt", default=True),
        lora=lora,
        cache_salt=fields.text(body, "cache_salt"),
    )


def text_prompt(prompt: object, lora: str | None = None, cache_salt: str | None = None) -> Prompt:
    """The prompt of a text or a list of token ids."""
    builder = PromptBuilder()
    if isinstance(prompt, str):
        builder.text(prompt)
    elif isinstance(prompt, list):
        builder.token_ids(prompt)
    else:
        raise bad_request("prompt: Input should be a string or a list of token ids", "prompt")
    return builder.build(lora, cache_salt)


def chat_answers(body: dict[str, Any], seeds: Sequence[bytes], max_tokens: int | None) -> list[Answer]:
    """What a chat request is answered with: a tool call where the request forces one, else text."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return [text_answer(seed, max_tokens) for seed in seeds]
    functions = [
        fields.mapping(fields.as_mapping(tool, "tools"), "function") for tool in fields.sequence(body, "tools")
    ]
    if choice == "required":
        if not functions:
            raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
        name, finish_reason = fields.required_text(functions[0], "name"), "tool_calls"
    else:
        named = fields.mapping(fields.as_mapping(choice, "tool_choice"), "function")
        name, finish_reason = fields.required_text(named, "name"), "stop"
    for function in functions:
        if function.get("name") == name:
            return [tool_answer(seed, function, finish_reason, max_tokens) for seed in seeds]
    raise bad_request("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")


def usage_body(replica: Replica, usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`. Like vLLM, it has details only when some tokens were cached: a miss looks like no report."""
    reported = replica.settings.prompt_tokens_details and usage.cached_tokens
    details = {"cached_tokens": usage.cached_tokens} if reported else None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": details,
    }


def _message(answer: Answer) -> dict[str, Any]:
    text = "".join(answer.pieces)
    calls = []
    if answer.tool is not None:
        function = {"name": answer.tool.name, "arguments": text}
        calls.append({"id": answer.tool.id, "type": "function", "function": function})
    content = None if answer.tool is not None else text
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls, "reasoning": None}


def _choice_seeds(body: dict[str, Any], prompts: Sequence[Prompt]) -> list[bytes]:
    """`n` seeds for each prompt; the first choice of equal prompts is equal whatever n is."""
    n = fields.integer(body, "n", minimum=1) or 1
    if n * len(prompts) > _MAX_CHOICES:
        raise bad_request(f"n: at most {_MAX_CHOICES} choices in one request", "n")
    return [prompt.seed + bytes(choice) for prompt in prompts for choice in range(n)]


def _prompt_list(prompt: object) -> list[object]:
    """A completion's prompts: text, token ids, or a list of either."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _stream_options(body: dict[str, Any]) -> tuple[bool, bool]:
    """(streamed, with a usage chunk)."""
    stream = fields.flag(body, "stream")
    options = fields.mapping(body, "stream_options")
    if options and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    return stream, fields.flag(options, "include_usage")


class _Chunks:
    """What the two APIs' streams share: a fixed envelope around each choice, a usage chunk, [DONE]."""

    def __init__(self, call: Call, model: str, kind: str, id_prefix: str, include_usage: bool) -> None:
        envelope = {
            "id": f"{id_prefix}{call.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._envelope = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self._replica = call.replica
        self._include_usage = include_usage

    def head(self) -> bytes:
        return b""

    def tail(self, generation: Generation) -> bytes:
        usage = b""
        if self._include_usage:
            fields_sent = usage_body(self._replica, generation.usage()).items()
            body = orjson.dumps({name: value for name, value in fields_sent if value is not None})
            usage = self._envelope + b'],"usage":' + body + b"}\n\n"
        return usage + b"data: [DONE]\n\n"

    def chunk(self, choice: bytes) -> bytes:
        return self._envelope + choice + b"]}\n\n"


class _ChatChunks(_Chunks):
    def __init__(self, call: Call, model: str, answers: Sequence[Answer], include_usage: bool) -> None:
        super().__init__(call, model, "chat.completion.chunk", "chatcmpl-", include_usage)
        self._answers = answers
        self._opened = False

    def piece(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        opening = b"" if self._opened else b"".join(self._openings())
        self._opened = True
        if self._answers[choice].tool is None:
            delta: dict[str, Any] = {"content": text}
        else:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return opening + self._delta(choice, delta, finish_reason)

    def _openings(self) -> list[bytes]:
        opening: dict[str, Any] = {"role": "assistant", "content": ""}
        chunks = [self._delta(choice, opening, None) for choice in range(len(self._answers))]
        for choice, answer in enumerate(self._answers):
            if answer.tool is not None:
                function = {"name": answer.tool.name, "arguments": ""}
                start = {"id": answer.tool.id, "type": "function", "index": 0, "function": function}
                chunks.append(self._delta(choice, {"tool_calls": [start]}, None))
        return chunks

    def _delta(self, choice: int, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        body = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            body["stop_reason"] = None
        return self.chunk(orjson.dumps(body))


class _CompletionChunks(_Chunks):
    def __init__(self, call: Call, model: str, include_usage: bool) -> None:
        super().__init__(call, model, "text_completion", "cmpl-", include_usage)

    def piece(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        body = {
            "index": choice,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
        }
        return self.chunk(orjson.dumps(body))
