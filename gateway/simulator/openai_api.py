"""/v1/chat/completions and /v1/completions; their streams are in openai_stream.py."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from aiohttp import web

from gateway.simulator import fields
from gateway.simulator.answers import DEFAULT_TOKENS, GeneratedAnswer
from gateway.simulator.call import Call
from gateway.simulator.chat_template import render_chat, text_of_content
from gateway.simulator.errors import bad_request, bad_value
from gateway.simulator.generation import Generation
from gateway.simulator.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.simulator.openai_stream import ChatChunks, CompletionChunks, Told, usage_body
from gateway.simulator.planning import check_tools, plan
from gateway.simulator.prompt import EnginePrompt, PromptBuilder, token_ids, tokens_of
from gateway.simulator.replica import SimReplica
from gateway.simulator.sampling import check_sampling


async def chat_completions(call: Call) -> web.StreamResponse:
    body = call.body
    model, lora = call.replica.resolve_model(body.get("model"))
    check_sampling(body)
    check_tools(body)
    logprobs = chat_logprobs(body)
    prompt = chat_prompt(call.replica, body, lora)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    answers = plan(body, [prompt], [call.replica.token_limit(prompt, body.get(name), name)])
    echoed = _last_words(body) if body.get("echo") else ""
    stream = fields.flag(body, "stream")
    generation = call.generate([prompt], answers, stream)
    if stream:
        return await call.stream(generation, ChatChunks(call, model, prompt, answers, logprobs, echoed))
    await call.complete(generation)
    choices = [
        {
            "index": index,
            "message": _message(answer, echoed),
            "logprobs": None if logprobs is None else logprobs.chat(answer.pieces),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": _ids_if_wanted(call, answer.tokens),
            "routed_experts": None,
        }
        for index, answer in enumerate(answers)
    ]
    return await call.respond(
        {
            **_envelope(call, "chatcmpl", "chat.completion", model, choices, generation),
            "prompt_logprobs": _prompt_logprobs(body, prompt),
            "prompt_token_ids": _ids_if_wanted(call, prompt.tokens),
            "prompt_text": None,
        }
    )


async def completions(call: Call) -> web.StreamResponse:
    body = call.body
    model, lora = call.replica.resolve_model(body.get("model"))
    check_sampling(body)
    prompts = [text_prompt(each, lora, body.get("cache_salt")) for each in _prompt_list(body.get("prompt"))]
    told = _told(body)
    # Unlike chat, completions have a default in vLLM: 16 tokens.
    max_tokens = body.get("max_tokens", DEFAULT_TOKENS) if told.answer else 1
    answers = plan(body, prompts, [call.replica.token_limit(each, max_tokens, "max_tokens") for each in prompts])
    if not told.answer:
        answers = [replace(answer, shown=[""]) for answer in answers]
    stream = fields.flag(body, "stream")
    generation = call.generate(prompts, answers, stream)
    prompt_of = [sequence.prompt for sequence in generation.sequences]
    if stream:
        return await call.stream(generation, CompletionChunks(call, model, prompt_of, answers, told))
    await call.complete(generation)
    choices = [
        {
            "index": index,
            "text": told.text(prompt, answer.text),
            "logprobs": told.logprobs_of(prompt, answer.pieces, 0, 0),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": _ids_if_wanted(call, answer.tokens),
            "prompt_logprobs": _prompt_logprobs(body, prompt, body.get("logprobs") if told.echo else None),
            "prompt_token_ids": _ids_if_wanted(call, prompt.tokens),
            "routed_experts": None,
        }
        for index, (prompt, answer) in enumerate(zip(prompt_of, answers, strict=True))
    ]
    return await call.respond(_envelope(call, "cmpl", "text_completion", model, choices, generation))


def chat_prompt(replica: SimReplica, body: dict[str, Any], lora: str | None) -> EnginePrompt:
    """The prompt of a body with chat `messages`."""
    generation_prompt = fields.flag(body, "add_generation_prompt", default=True)
    continue_final_message = fields.flag(body, "continue_final_message")
    if generation_prompt and continue_final_message:
        raise bad_request("continue_final_message and add_generation_prompt are not compatible.")
    return render_chat(
        fields.sequence(body, "messages"),
        replica.images,
        tools=fields.sequence(body, "tools"),
        template_kwargs=fields.mapping(body, "chat_template_kwargs"),
        generation_prompt=generation_prompt,
        continue_final_message=continue_final_message,
        lora=lora,
        cache_salt=fields.text(body, "cache_salt"),
    )


def text_prompt(prompt: object, lora: str | None = None, cache_salt: str | None = None) -> EnginePrompt:
    """The prompt of a text or a list of token ids."""
    builder = PromptBuilder()
    if isinstance(prompt, str):
        builder.text(prompt)
    elif isinstance(prompt, list):
        builder.token_ids(prompt)
    else:
        raise bad_request("prompt: Input should be a string or a list of token ids", "prompt")
    return builder.build(lora, cache_salt)


def _envelope(
    call: Call, prefix: str, kind: str, model: str, choices: list[dict[str, Any]], generation: Generation
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{call.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage_body(call.replica, generation.usage()),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _message(answer: GeneratedAnswer, echoed: str) -> dict[str, Any]:
    """The message of a choice. As in vLLM, it has `tool_calls` only if there are some."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": None}
    message |= {"audio": None, "function_call": None, "reasoning": None}
    if answer.tool is None:
        return message | {"content": echoed + answer.text}
    function = {"name": answer.tool.name, "arguments": answer.text}
    return message | {"tool_calls": [{"id": answer.tool.id, "type": "function", "function": function}]}


def _last_words(body: dict[str, Any]) -> str:
    """The text of the last message, if it is the assistant's."""
    last = body["messages"][-1]
    return text_of_content(last.get("content")) if last.get("role") == "assistant" else ""


def _told(body: dict[str, Any]) -> Told:
    """`max_tokens` 0 with `echo` returns the prompt only. One token is still generated, and counted."""
    echo = bool(body.get("echo"))
    return Told(echo, answer=not echo or body.get("max_tokens") != 0, logprobs=completion_logprobs(body))


def _prompt_logprobs(body: dict[str, Any], prompt: EnginePrompt, default: int | None = None) -> list[Any] | None:
    top = body.get("prompt_logprobs", default)
    return None if top is None else prompt_logprobs(tokens_of(prompt.tokens), top)


def _ids_if_wanted(call: Call, tokens: bytes) -> list[int] | None:
    return token_ids(tokens) if fields.flag(call.body, "return_token_ids") else None


def _prompt_list(prompt: Any) -> list[Any]:
    """A completion's prompts: text, token ids, or a list of either."""
    if prompt is None or prompt == "":
        raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise bad_request("You must pass at least one prompt")
    return list(prompt)
