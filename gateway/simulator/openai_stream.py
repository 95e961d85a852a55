"""The streams of /v1/chat/completions and /v1/completions: vLLM's chunks as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.call import Call
from gateway.simulator.generation import Generation, SimUsage
from gateway.simulator.logprobs import Logprobs
from gateway.simulator.prompt import EnginePrompt, token_ids, token_of, tokens_of
from gateway.simulator.replica import SimReplica


def usage_body(replica: SimReplica, usage: SimUsage) -> dict[str, Any]:
    """OpenAI's `usage`. As in vLLM, it has details only if some tokens were cached: a miss looks like no report."""
    reported = replica.settings.prompt_tokens_details and usage.cached_tokens
    details = {"cached_tokens": usage.cached_tokens} if reported else None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": details,
    }


_NO_TOKEN = {"logprobs": None, "finish_reason": None}
"""Further fields of a chat chunk without a token."""


class _Chunks:
    """The common part of the two APIs' streams: a fixed envelope around each choice, a usage chunk, [DONE].

    As in vLLM, fields that are null without `return_token_ids` are sent too.
    """

    _usage_details: ClassVar[dict[str, Any]] = {}
    """Further fields of the usage in each chunk."""

    def __init__(self, call: Call, model: str, kind: str, answers: Sequence[GeneratedAnswer]) -> None:
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        envelope = {"id": f"{prefix}-{call.request_id}", "object": kind, "created": int(time.time()), "model": model}
        self._envelope = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self._replica = call.replica
        options = fields.mapping(call.body, "stream_options")
        self._include_usage = fields.flag(options, "include_usage")
        self._continuous_usage = self._include_usage and fields.flag(options, "continuous_usage_stats")
        self._with_token_ids = fields.flag(call.body, "return_token_ids")
        self._answers = answers

    def head(self) -> bytes:
        return b""

    def tail(self, generation: Generation) -> bytes:
        usage = b""
        if self._include_usage:
            fields_sent = usage_body(self._replica, generation.usage()).items()
            body = orjson.dumps({name: value for name, value in fields_sent if value is not None})
            usage = self._envelope + b'],"usage":' + body + b"}\n\n"
        return usage + b"data: [DONE]\n\n"

    def chunk(self, choice: bytes, prompt_tokens: int, tokens: int, more: bytes = b"") -> bytes:
        """One chunk with one choice, which has so many `tokens` by now. `more` holds further fields, each after a
        comma."""
        if self._continuous_usage:
            usage: dict[str, Any] = {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + tokens,
                "completion_tokens": tokens,
            }
            more += b',"usage":' + orjson.dumps(usage | self._usage_details)
        return self._envelope + choice + b"]" + more + b"}\n\n"

    def ids_of(self, tokens: bytes) -> list[int] | None:
        return token_ids(tokens) if self._with_token_ids else None


class ChatChunks(_Chunks):
    _usage_details: ClassVar = {"completion_tokens_details": None}

    def __init__(
        self,
        call: Call,
        model: str,
        prompt: EnginePrompt,
        answers: Sequence[GeneratedAnswer],
        logprobs: Logprobs | None,
        echoed: str = "",
    ) -> None:
        """`echoed` precedes each answer."""
        super().__init__(call, model, "chat.completion.chunk", answers)
        self._logprobs = logprobs
        self._prompt = prompt
        self._echoed = echoed
        self._opened = False

    def piece(self, choice: int, at: int) -> bytes:
        opening = b"" if self._opened else b"".join(self._openings())
        self._opened = True
        answer = self._answers[choice]
        text, piece = answer.texts[at], answer.pieces[at]
        if answer.tool is None:
            delta: dict[str, Any] = {"content": text} if text else {}
        else:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        body = {
            "index": choice,
            "delta": delta,
            "logprobs": None if self._logprobs is None else self._logprobs.chat([piece], at),
            "finish_reason": None,
        }
        if at == len(answer.pieces) - 1:
            body["finish_reason"] = answer.finish_reason
            body["stop_reason"] = answer.stop_reason
        body["token_ids"] = self.ids_of(token_of(piece))
        return opening + self.chunk(orjson.dumps(body), self._prompt.num_tokens, at + 1)

    def _openings(self) -> list[bytes]:
        prompt_ids = b',"prompt_token_ids":' + orjson.dumps(self.ids_of(self._prompt.tokens)) + b',"prompt_text":null'
        choices = range(len(self._answers))
        chunks = [self._opening(choice, {"role": "assistant", "content": ""}, prompt_ids) for choice in choices]
        if self._echoed:
            chunks += [self._opening(choice, {"content": self._echoed}) for choice in choices]
        for choice, answer in enumerate(self._answers):
            if answer.tool is not None:
                function = {"name": answer.tool.name, "arguments": ""}
                start = {"id": answer.tool.id, "type": "function", "index": 0, "function": function}
                chunks.append(self._opening(choice, {"tool_calls": [start]}))
        return chunks

    def _opening(self, choice: int, delta: dict[str, Any], more: bytes = b"") -> bytes:
        body = orjson.dumps({"index": choice, "delta": delta, **_NO_TOKEN})
        return self.chunk(body, self._prompt.num_tokens, 0, more)


@dataclass(frozen=True, slots=True)
class Told:
    """What a completion tells of a prompt and its answer: with `echo` the prompt comes first."""

    echo: bool
    answer: bool
    logprobs: Logprobs | None

    def text(self, prompt: EnginePrompt, text: str) -> str:
        return prompt.text + text if self.echo else text

    def logprobs_of(self, prompt: EnginePrompt, pieces: Sequence[str], at: int, offset: int) -> dict[str, Any] | None:
        """Of some tokens of the answer from the one at `at` on; with the first of them, of the prompt's."""
        if self.logprobs is None:
            return None
        num_prompt_tokens = prompt.num_tokens if self.echo else 0
        tokens = tokens_of(prompt.tokens) if self.echo and at == 0 else []
        if self.answer:
            tokens += map(token_of, pieces)
        first = 0 if at == 0 else num_prompt_tokens + at
        return self.logprobs.completion(tokens, num_prompt_tokens, first, offset)


class CompletionChunks(_Chunks):
    def __init__(
        self, call: Call, model: str, prompts: Sequence[EnginePrompt], answers: Sequence[GeneratedAnswer], told: Told
    ) -> None:
        """`prompts` has the prompt of each choice."""
        super().__init__(call, model, "text_completion", answers)
        self._prompts = prompts
        self._told = told
        self._offsets = [0] * len(answers)
        """How many characters of each choice's tokens were sent with log probabilities."""

    def piece(self, choice: int, at: int) -> bytes:
        answer, prompt = self._answers[choice], self._prompts[choice]
        text, piece = answer.texts[at], answer.pieces[at]
        is_last = at == len(answer.pieces) - 1
        body = {
            "index": choice,
            "text": self._told.text(prompt, text) if at == 0 else text,
            "logprobs": self._logprobs_of(choice, at),
            "finish_reason": answer.finish_reason if is_last else None,
            "stop_reason": answer.stop_reason if is_last else None,
            "prompt_token_ids": self.ids_of(prompt.tokens) if at == 0 else None,
            "token_ids": self.ids_of(token_of(piece)),
        }
        return self.chunk(orjson.dumps(body), prompt.num_tokens, at + 1)

    def _logprobs_of(self, choice: int, at: int) -> dict[str, Any] | None:
        piece = self._answers[choice].pieces[at]
        logprobs = self._told.logprobs_of(self._prompts[choice], [piece], at, self._offsets[choice])
        if logprobs is not None:
            self._offsets[choice] += sum(map(len, logprobs["tokens"]))
        return logprobs
