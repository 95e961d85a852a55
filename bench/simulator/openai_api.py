"""/v1/chat/completions and /v1/completions; their streams are in openai_stream.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from bench.simulator import fields
from bench.simulator.answers import DEFAULT_TOKENS, Answer, text_answer, tool_answer
from bench.simulator.call import Call
from bench.simulator.chat_template import render_chat
from bench.simulator.errors import bad_request
from bench.simulator.openai_stream import ChatChunks, CompletionChunks, usage_body
from bench.simulator.prompt import Prompt, PromptBuilder, token_ids
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
        chunks = ChatChunks(call, model, prompt, answers, include_usage)
        return await call.stream(generation, chunks)
    await call.complete(generation)
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": None,
            "token_ids": _ids_if_wanted(call, answer.tokens),
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
            "prompt_token_ids": _ids_if_wanted(call, prompt.tokens),
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
    prompt_of = [sequence.prompt for sequence in generation.sequences]
    if stream:
        return await call.stream(generation, CompletionChunks(call, model, prompt_of, include_usage))
    await call.complete(generation)
    choices = [
        {
            "index": index,
            "text": "".join(answer.pieces),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": None,
            "token_ids": _ids_if_wanted(call, answer.tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": _ids_if_wanted(call, prompt_of[index].tokens),
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


def _message(answer: Answer) -> dict[str, Any]:
    text = "".join(answer.pieces)
    calls = []
    if answer.tool is not None:
        function = {"name": answer.tool.name, "arguments": text}
        calls.append({"id": answer.tool.id, "type": "function", "function": function})
    content = None if answer.tool is not None else text
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls, "reasoning": None}


def _ids_if_wanted(call: Call, tokens: bytes) -> list[int] | None:
    return token_ids(tokens) if fields.flag(call.body, "return_token_ids") else None


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
