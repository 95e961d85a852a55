"""The streams of /v1/chat/completions and /v1/completions: vLLM's chunks as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from bench.simulator import fields
from bench.simulator.answers import Answer
from bench.simulator.call import Call
from bench.simulator.generation import Generation, Usage
from bench.simulator.prompt import Prompt, token_ids, token_of
from bench.simulator.replica import Replica


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


class _Chunks:
    """What the two APIs' streams share: a fixed envelope around each choice, a usage chunk, [DONE].

    Fields that are null without `return_token_ids` are sent all the same, as by vLLM.
    """

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
        self._with_token_ids = fields.flag(call.body, "return_token_ids")

    def head(self) -> bytes:
        return b""

    def tail(self, generation: Generation) -> bytes:
        usage = b""
        if self._include_usage:
            fields_sent = usage_body(self._replica, generation.usage()).items()
            body = orjson.dumps({name: value for name, value in fields_sent if value is not None})
            usage = self._envelope + b'],"usage":' + body + b"}\n\n"
        return usage + b"data: [DONE]\n\n"

    def chunk(self, choice: bytes, more: bytes = b"") -> bytes:
        """One chunk with one choice; `more` is further fields, each with a comma before it."""
        return self._envelope + choice + b"]" + more + b"}\n\n"

    def ids_of(self, tokens: bytes) -> list[int] | None:
        return token_ids(tokens) if self._with_token_ids else None


class ChatChunks(_Chunks):
    def __init__(self, call: Call, model: str, prompt: Prompt, answers: Sequence[Answer], include_usage: bool) -> None:
        super().__init__(call, model, "chat.completion.chunk", "chatcmpl-", include_usage)
        self._prompt = prompt
        self._answers = answers
        self._opened = False

    def piece(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        opening = b"" if self._opened else b"".join(self._openings())
        self._opened = True
        if self._answers[choice].tool is None:
            delta: dict[str, Any] = {"content": text}
        else:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return opening + self._delta(choice, delta, token_of(text), finish_reason)

    def _openings(self) -> list[bytes]:
        prompt_ids = b',"prompt_token_ids":' + orjson.dumps(self.ids_of(self._prompt.tokens))
        chunks = []
        for choice in range(len(self._answers)):
            opening = {"role": "assistant", "content": ""}
            body = {"index": choice, "delta": opening, "logprobs": None, "finish_reason": None}
            chunks.append(self.chunk(orjson.dumps(body), prompt_ids))
        for choice, answer in enumerate(self._answers):
            if answer.tool is not None:
                function = {"name": answer.tool.name, "arguments": ""}
                start = {"id": answer.tool.id, "type": "function", "index": 0, "function": function}
                chunks.append(self._delta(choice, {"tool_calls": [start]}, b"", None))
        return chunks

    def _delta(self, choice: int, delta: dict[str, Any], tokens: bytes, finish_reason: str | None) -> bytes:
        body = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            body["stop_reason"] = None
        body["token_ids"] = self.ids_of(tokens)
        return self.chunk(orjson.dumps(body))


class CompletionChunks(_Chunks):
    def __init__(self, call: Call, model: str, prompts: Sequence[Prompt], include_usage: bool) -> None:
        """`prompts` has the prompt of each choice."""
        super().__init__(call, model, "text_completion", "cmpl-", include_usage)
        self._prompts = prompts
        self._opened: set[int] = set()

    def piece(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        is_first = choice not in self._opened
        self._opened.add(choice)
        body = {
            "index": choice,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "prompt_token_ids": self.ids_of(self._prompts[choice].tokens) if is_first else None,
            "token_ids": self.ids_of(token_of(text)),
        }
        return self.chunk(orjson.dumps(body))
