"""One connection to a light replica: reads its requests with httptools, and answers them as the simulated replica does.

The fields of answers are those of gateway/simulator/openai_api.py. Not done here: more than one choice or prompt, log
probabilities, token ids in answers, the other APIs, faults on demand, LoRA adapters, priorities. A body is checked less
than there. Answers have no Date. `kvgate doctor` finds only that a replica lists no ZeroMQ
publisher, because its agent is in the same process. The header x-light-replica has the replica's id, for routers that
do not tell it.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, cast

import httptools
import orjson

from bench.fleet.engine import LightSequence
from bench.fleet.replica import LightReplica, whole
from gateway.simulator import fields
from gateway.simulator.answers import DEFAULT_TOKENS, GeneratedAnswer, forced_function, plan
from gateway.simulator.chat_template import render_chat
from gateway.simulator.errors import RequestRefused, bad_request
from gateway.simulator.prompt import EnginePrompt, PromptBuilder
from gateway.simulator.protocol import token_limit
from gateway.simulator.sequence import EventTag

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-request-id: %b\r\nx-light-replica: %b\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Exchange(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self, replica: LightReplica) -> None:
        self._replica = replica
        self._parser = httptools.HttpRequestParser(self)
        self._answering: _Answering | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._replica.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._replica.connections.discard(self._transport)
        if self._idle is not None:
            self._idle.cancel()
        if self._answering is not None:
            self._answering.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._body: list[bytes] = []
        self._session: str | None = None
        self._request_id = b""
        if self._idle is not None:
            self._idle.cancel()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"x-session-id":
            self._session = value.decode("latin-1")
        elif name == b"x-request-id":
            self._request_id = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, _, _ = self._url.decode("latin-1").partition("?")
        try:
            if self._parser.get_method() != b"POST":
                self.answered(self._replica.get(path))
            elif path in _PROMPTS:
                self._generate(path, fields.json_object(b"".join(self._body)))
            else:
                self.answered(self._replica.post(path))
        except RequestRefused as refused:
            self.answered(whole(refused.status, refused.body_for(path)))
        except (ValueError, TypeError, ArithmeticError, KeyError, AttributeError) as error:
            self.answered(whole(400, bad_request(str(error)).body_for(path)))

    def _generate(self, path: str, body: dict[str, Any]) -> None:
        replica = self._replica
        replica.num_requests += 1
        model = body.get("model") or replica.settings.served_name
        if model != replica.settings.served_name:
            raise RequestRefused(404, f"The model `{model}` does not exist.", "model")
        prompt, answer = _PROMPTS[path](replica, body)
        xargs = fields.mapping(body, "vllm_xargs")
        session = fields.text(body, "session_id") or self._session or fields.text(xargs, "session_id")
        tag = EventTag(session, xargs.get("kv_cache_report_mode") == "full")
        kind = _Stream if fields.flag(body, "stream") else _Answering
        answering = kind(self, replica, path, body, self._request_id or os.urandom(16).hex().encode())
        answering.begin(LightSequence(prompt, answer, replica.settings.block_tokens, tag, answering.prefilled))
        self._answering = answering

    # -- answers -------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def answered(self, data: bytes) -> None:
        """Write the end of an answer."""
        self._transport.write(data)
        self._answering = None
        keep_alive_s = self._replica.settings.keep_alive_s
        self._idle = asyncio.get_running_loop().call_later(keep_alive_s, self._transport.close)


class _Answering:
    """An answer that is sent whole."""

    def __init__(
        self, exchange: Exchange, replica: LightReplica, path: str, body: dict[str, Any], request_id: bytes
    ) -> None:
        self.is_chat = path == _CHAT
        self.body = body
        self.exchange = exchange
        self.request_id = request_id
        self.replica_id = replica.id.encode()
        self._engine = replica.engine
        self.settings = replica.settings
        self.sequence: LightSequence
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, sequence: LightSequence) -> None:
        self.sequence = sequence
        self._engine.submit(sequence)

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._engine.abort(self.sequence)

    def prefilled(self) -> None:
        self.after(len(self.sequence.answer.pieces))

    def after(self, tokens: int) -> None:
        """Call `arrived` when this many more tokens are generated."""
        seconds = tokens * self.settings.decode_s_per_token / self.settings.speed
        self._timer = asyncio.get_running_loop().call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None  # it refers to this answer: a cycle would keep both in memory
        self.arrived()

    def arrived(self) -> None:
        self._engine.finish(self.sequence)
        told = b"x-request-id: %b\r\nx-light-replica: %b\r\n" % (self.request_id, self.replica_id)
        self.exchange.answered(whole(200, orjson.dumps(self._document()), more=told))

    def finish(self) -> None:
        self._engine.finish(self.sequence)

    def usage(self) -> dict[str, Any]:
        """As in vLLM, it has details only if some tokens were cached."""
        prompt_tokens, completion_tokens = self.sequence.prompt.num_tokens, len(self.sequence.answer.pieces)
        cached_tokens = self.sequence.cached_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens} if cached_tokens else None,
        }

    def envelope(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        name = self.settings.served_name
        answer_id = f"{prefix}-{self.request_id.decode('latin-1')}"
        return {"id": answer_id, "object": kind, "created": int(time.time()), "model": name}

    def _document(self) -> dict[str, Any]:
        answer = self.sequence.answer
        ending = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason, "token_ids": None}
        if self.is_chat:
            choice = {"index": 0, "message": _message(answer), "logprobs": None, **ending, "routed_experts": None}
            more = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        else:
            told = {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
            choice, more = {"index": 0, "text": answer.text, "logprobs": None, **ending, **told}, {}
        return {
            **self.envelope("chat.completion" if self.is_chat else "text_completion"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage(),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
            **more,
        }


class _Stream(_Answering):
    """An answer as server-sent events."""

    def begin(self, sequence: LightSequence) -> None:
        super().begin(sequence)
        self._sent = 0
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        self._head = b"data: " + orjson.dumps(self.envelope(kind))[:-1] + b',"choices":['
        self.exchange.write(_STREAM_HEAD % (self.request_id, self.replica_id))

    def prefilled(self) -> None:
        self.after(self._next_tokens())

    def _next_tokens(self) -> int:
        """As in the simulator, the first token comes alone."""
        return min(self.settings.tokens_per_chunk if self._sent else 1, len(self.sequence.answer.pieces) - self._sent)

    def arrived(self) -> None:
        first, last = self._sent, self._sent + self._next_tokens()
        out = self._opening() if self.is_chat and first == 0 else b""
        self._sent = last
        out += self._piece(first, last)
        if last < len(self.sequence.answer.pieces):
            self.exchange.write(_chunk(out))
            self.after(self._next_tokens())
            return
        self.finish()
        if fields.flag(fields.mapping(self.body, "stream_options"), "include_usage"):
            told = {name: value for name, value in self.usage().items() if value is not None}
            out += self._head + b'],"usage":' + orjson.dumps(told) + b"}\n\n"
        self.exchange.answered(_chunk(out + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _opening(self) -> bytes:
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._head + orjson.dumps(opening) + b'],"prompt_token_ids":null,"prompt_text":null}\n\n'

    def _piece(self, first: int, last: int) -> bytes:
        answer = self.sequence.answer
        text, is_last = "".join(answer.texts[first:last]), last == len(answer.pieces)
        choice: dict[str, Any] = {"index": 0}
        if not self.is_chat:
            choice["text"] = text
        elif answer.tool is None:
            choice["delta"] = {"content": text} if text else {}
        else:
            named = {} if first else {"id": answer.tool.id, "type": "function"}
            function = {"arguments": text} | ({} if first else {"name": answer.tool.name})
            choice["delta"] = {"tool_calls": [{"index": 0, "function": function, **named}]}
        choice |= {"logprobs": None, "finish_reason": answer.finish_reason if is_last else None}
        if is_last or not self.is_chat:
            choice["stop_reason"] = answer.stop_reason if is_last else None
        if not self.is_chat:
            choice["prompt_token_ids"] = None
        return self._head + orjson.dumps(choice | {"token_ids": None}) + b"]}\n\n"


def _message(answer: GeneratedAnswer) -> dict[str, Any]:
    """The message of a choice. As in vLLM, it has `tool_calls` only if there are some."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": None}
    message |= {"audio": None, "function_call": None, "reasoning": None}
    if answer.tool is None:
        return message | {"content": answer.text}
    function = {"name": answer.tool.name, "arguments": answer.text}
    return message | {"tool_calls": [{"id": answer.tool.id, "type": "function", "function": function}]}


def _chat(replica: LightReplica, body: dict[str, Any]) -> tuple[EnginePrompt, GeneratedAnswer]:
    function = forced_function(body)
    prompt = render_chat(
        fields.sequence(body, "messages"),
        replica.images,
        tools=fields.sequence(body, "tools") if body.get("tool_choice") != "none" else (),
        template_kwargs=fields.mapping(body, "chat_template_kwargs"),
        cache_salt=fields.text(body, "cache_salt"),
    )
    max_tokens = body.get("max_completion_tokens")
    max_tokens = body.get("max_tokens") if max_tokens is None else max_tokens
    return prompt, _answer(replica, body, prompt, max_tokens, function)


def _completion(replica: LightReplica, body: dict[str, Any]) -> tuple[EnginePrompt, GeneratedAnswer]:
    asked = body.get("prompt")
    if not asked:
        raise bad_request("prompt: Field required", "prompt")
    builder = PromptBuilder()
    if isinstance(asked, str):
        builder.text(asked)
    elif isinstance(asked, list) and all(isinstance(each, int) for each in asked):
        builder.token_ids(asked)
    else:
        raise bad_request("a light replica takes one prompt, as a string or as a list of token ids", "prompt")
    prompt = builder.build(cache_salt=fields.text(body, "cache_salt"))
    return prompt, _answer(replica, body, prompt, body.get("max_tokens", DEFAULT_TOKENS))


def _answer(
    replica: LightReplica,
    body: dict[str, Any],
    prompt: EnginePrompt,
    max_tokens: int | None,
    function: dict[str, Any] | None = None,
) -> GeneratedAnswer:
    limit = replica.settings.capacity_tokens
    if prompt.num_tokens + 1 > limit:
        raise bad_request(f"This model's maximum context length is {limit} tokens.", "input_tokens")
    answers = plan(
        body, [prompt], [token_limit(max_tokens, prompt.num_tokens, limit)], max_tokens is not None, function
    )
    if len(answers) > 1:
        raise bad_request("a light replica gives one answer", "n")
    return answers[0]


_CHAT = "/v1/chat/completions"
_PROMPTS = {_CHAT: _chat, "/v1/completions": _completion}
"""The paths that generate: each reads a body's prompt, and plans the answer."""
