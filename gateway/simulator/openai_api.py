"""/v1/chat/completions and /v1/completions, whole and as vLLM's chunks in server-sent events."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from aiohttp import web

from gateway.simulator import fields
from gateway.simulator.answers import DEFAULT_TOKENS, GeneratedAnswer, forced_function, plan
from gateway.simulator.call import Call, Dialect
from gateway.simulator.chat_template import render_chat
from gateway.simulator.engine import Generation
from gateway.simulator.errors import bad_request
from gateway.simulator.logprobs import chat_logprobs, completion_logprobs, wanted_of_chat
from gateway.simulator.prompt import EnginePrompt, PromptBuilder, token_ids, token_of
from gateway.simulator.protocol import check_together
from gateway.simulator.replica import SimReplica


@dataclass(frozen=True, slots=True)
class PlannedChat:
    """A request that was read as a chat request, and its answers."""

    model: str
    prompt: EnginePrompt
    answers: list[GeneratedAnswer]
    top_logprobs: int | None
    """None: it wants no log probabilities."""


def planned_chat(call: Call, body: dict[str, Any], max_tokens: int | None) -> PlannedChat:
    """Read `body`, the chat request that a call stands for. Raises a 400."""
    model, lora = call.replica.resolve_model(call.body.get("model"))
    check_together(body)
    function = forced_function(body)
    top_logprobs = wanted_of_chat(body)
    prompt = chat_prompt(call.replica, body, lora)
    limit = call.replica.token_limit(prompt, max_tokens)
    answers = plan(body, [prompt], [limit], max_tokens is not None, function)
    return PlannedChat(model, prompt, answers, top_logprobs)


async def chat_completions(call: Call) -> web.StreamResponse:
    max_tokens = call.body.get("max_completion_tokens")
    chat = planned_chat(call, call.body, call.body.get("max_tokens") if max_tokens is None else max_tokens)
    return await call.answer(call.generate([chat.prompt], chat.answers), _ChatAnswers(call, chat))


async def completions(call: Call) -> web.StreamResponse:
    body = call.body
    model, lora = call.replica.resolve_model(body.get("model"))
    check_together(body)
    prompts = [text_prompt(each, lora, body.get("cache_salt")) for each in _prompt_list(body.get("prompt"))]
    max_tokens = body.get("max_tokens", DEFAULT_TOKENS)  # unlike chat, completions have a default in vLLM
    limits = [call.replica.token_limit(each, max_tokens) for each in prompts]
    answers = plan(body, prompts, limits, max_tokens is not None)
    prompt_of = [prompt for prompt in prompts for _ in range(len(answers) // len(prompts))]
    dialect = _Completions(call, model, prompt_of, answers)
    return await call.answer(call.generate(prompts, answers), dialect)


def chat_prompt(replica: SimReplica, body: dict[str, Any], lora: str | None) -> EnginePrompt:
    """The prompt of a body with chat `messages`."""
    generation_prompt = fields.flag(body, "add_generation_prompt", default=True)
    continue_final_message = fields.flag(body, "continue_final_message")
    if generation_prompt and continue_final_message:
        raise bad_request("continue_final_message and add_generation_prompt are not compatible.")
    return render_chat(
        fields.sequence(body, "messages"),
        replica.images,
        tools=list(map(_tool, fields.sequence(body, "tools"))),
        template_kwargs=fields.mapping(body, "chat_template_kwargs"),
        generation_prompt=generation_prompt,
        continue_final_message=continue_final_message,
        lora=lora,
        cache_salt=fields.text(body, "cache_salt"),
    )


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as vLLM shows it to templates, whatever fields and whatever order of fields it came with. Raises a 400."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise bad_request("tools: each needs a function, which is an object", "tools")
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    told |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": told}


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


class _Answers(Dialect):
    """The common part of the two APIs. As in vLLM, fields that are null without `return_token_ids` are sent too."""

    _kinds: ClassVar[tuple[str, str, str]]
    """The prefix of ids, and the objects' names of a whole answer and of a chunk."""
    _usage_details: ClassVar[dict[str, Any]] = {}
    """Further fields of the usage in each chunk."""

    def __init__(
        self, call: Call, model: str, prompts: Sequence[EnginePrompt], answers: Sequence[GeneratedAnswer]
    ) -> None:
        """`prompts` has the prompt of each choice."""
        self._call = call
        self._model = model
        self._prompts = prompts
        self._answers = answers
        options = call.body.get("stream_options") or {}
        self._include_usage = options.get("include_usage")
        self._continuous_usage = self._include_usage and options.get("continuous_usage_stats")
        self._begin = b"data: " + orjson.dumps(self._envelope(self._kinds[2]))[:-1] + b',"choices":['

    def tail(self, generation: Generation) -> bytes:
        usage = b""
        if self._include_usage:
            told = {name: value for name, value in self._usage(generation).items() if value is not None}
            usage = self._begin + b'],"usage":' + orjson.dumps(told) + b"}\n\n"
        return usage + b"data: [DONE]\n\n"

    def whole(self, generation: Generation) -> dict[str, Any]:
        return {
            **self._envelope(self._kinds[1]),
            "choices": [self._choice(index, answer) for index, answer in enumerate(self._answers)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self._usage(generation),
            "kv_transfer_params": self._call.reference(generation),
            "ec_transfer_params": None,
            "metrics": None,
        }

    @abstractmethod
    def _choice(self, index: int, answer: GeneratedAnswer) -> dict[str, Any]:
        """One choice of the whole answer."""

    def _ending(self, answer: GeneratedAnswer) -> dict[str, Any]:
        ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        return {**ending, "token_ids": self._ids(answer.tokens), "routed_experts": None}

    def _envelope(self, kind: str) -> dict[str, Any]:
        answer_id = f"{self._kinds[0]}-{self._call.request_id}"
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": self._model}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """As in vLLM, it has details only if some tokens were cached: a miss looks like no report."""
        usage = generation.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.total_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if usage.cached_tokens else None,
        }

    def _chunk(self, choice: dict[str, Any], tokens: int, more: bytes = b"") -> bytes:
        """One chunk with one choice, which has so many `tokens` by now. `more` holds further fields, each after a
        comma."""
        if self._continuous_usage:
            prompt_tokens = self._prompts[choice["index"]].num_tokens
            usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens}
            more += b',"usage":' + orjson.dumps({**usage, "completion_tokens": tokens, **self._usage_details})
        return self._begin + orjson.dumps(choice) + b"]" + more + b"}\n\n"

    def _ids(self, tokens: bytes) -> list[int] | None:
        return token_ids(tokens) if self._call.body.get("return_token_ids") else None


class _ChatAnswers(_Answers):
    _kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    _usage_details: ClassVar = {"completion_tokens_details": None}

    def __init__(self, call: Call, chat: PlannedChat) -> None:
        super().__init__(call, chat.model, [chat.prompt] * len(chat.answers), chat.answers)
        self._top_logprobs = chat.top_logprobs
        self._opened = False

    def whole(self, generation: Generation) -> dict[str, Any]:
        told = {"prompt_logprobs": None, "prompt_token_ids": self._ids(self._prompts[0].tokens)}
        return {**super().whole(generation), **told, "prompt_text": None}

    def _choice(self, index: int, answer: GeneratedAnswer) -> dict[str, Any]:
        """As in vLLM, the message has `tool_calls` only if there are some."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None, "reasoning": None}
        if answer.tool is None:
            message["content"] = answer.text
        else:
            function = {"name": answer.tool.name, "arguments": answer.text}
            message["tool_calls"] = [{"id": answer.tool.id, "type": "function", "function": function}]
        logprobs = self._logprobs_of(answer.pieces)
        return {"index": index, "message": message, "logprobs": logprobs, **self._ending(answer)}

    def piece(self, choice: int, at: int) -> bytes:
        opening = b"" if self._opened else b"".join(self._openings())
        self._opened = True
        answer = self._answers[choice]
        text, piece = answer.texts[at], answer.pieces[at]
        delta: dict[str, Any] = {"content": text} if text else {}
        if answer.tool is not None:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        logprobs = self._logprobs_of([piece], at)
        body = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if at == len(answer.pieces) - 1:
            body |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        return opening + self._chunk(body | {"token_ids": self._ids(token_of(piece))}, at + 1)

    def _logprobs_of(self, pieces: Sequence[str], first: int = 0) -> dict[str, Any] | None:
        return None if self._top_logprobs is None else chat_logprobs(pieces, self._top_logprobs, first)

    def _openings(self) -> list[bytes]:
        told = b',"prompt_token_ids":' + orjson.dumps(self._ids(self._prompts[0].tokens)) + b',"prompt_text":null'
        start = {"role": "assistant", "content": ""}
        chunks = [self._opening(choice, start, told) for choice in range(len(self._answers))]
        for choice, answer in enumerate(self._answers):
            if answer.tool is not None:
                function = {"name": answer.tool.name, "arguments": ""}
                tool = {"id": answer.tool.id, "type": "function", "index": 0, "function": function}
                chunks.append(self._opening(choice, {"tool_calls": [tool]}))
        return chunks

    def _opening(self, choice: int, delta: dict[str, Any], more: bytes = b"") -> bytes:
        return self._chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}, 0, more)


class _Completions(_Answers):
    _kinds = ("cmpl", "text_completion", "text_completion")

    def __init__(
        self, call: Call, model: str, prompts: Sequence[EnginePrompt], answers: Sequence[GeneratedAnswer]
    ) -> None:
        super().__init__(call, model, prompts, answers)
        self._top_logprobs: int | None = call.body.get("logprobs")
        self._offsets = [0] * len(answers)
        """How many characters of each choice's tokens were sent with log probabilities."""

    def _choice(self, index: int, answer: GeneratedAnswer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs_of(index, answer.pieces, 0),
            **self._ending(answer),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(self._prompts[index].tokens),
        }

    def piece(self, choice: int, at: int) -> bytes:
        answer = self._answers[choice]
        piece, is_last = answer.pieces[at], at == len(answer.pieces) - 1
        body = {
            "index": choice,
            "text": answer.texts[at],
            "logprobs": self._logprobs_of(choice, [piece], at),
            "finish_reason": answer.finish_reason if is_last else None,
            "stop_reason": answer.stop_reason if is_last else None,
            "prompt_token_ids": self._ids(self._prompts[choice].tokens) if at == 0 else None,
            "token_ids": self._ids(token_of(piece)),
        }
        return self._chunk(body, at + 1)

    def _logprobs_of(self, choice: int, pieces: Sequence[str], at: int) -> dict[str, Any] | None:
        """Of some tokens of the answer from the one at `at` on."""
        if self._top_logprobs is None:
            return None
        told = completion_logprobs(pieces, self._top_logprobs, at, self._offsets[choice])
        self._offsets[choice] += sum(map(len, told["tokens"]))
        return told


def _prompt_list(prompt: Any) -> list[Any]:
    """A completion's prompts: text, token ids, or a list of either."""
    if prompt is None or prompt == "":
        raise bad_request("prompt: Field required", "prompt")
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise bad_request("You must pass at least one prompt")
    return list(prompt)
