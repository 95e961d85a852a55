"""An upstream whose own cost is small: every answer is prepared beforehand.

    python -m bench.overhead.canned --ports 8101,8102

It looks like a vLLM server with one model (GET /v1/models, /health, /metrics), so that any proxy accepts it.
`POST /canned?tokens=16&pace_ms=4` sets the answer to a POST for all ports at once. A pace of 0 writes a stream in one
piece.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import httptools
import orjson
import uvloop

MODEL = "canned"
_STREAM = (b'"stream":true', b'"stream": true')
_IDS = b'"return_token_ids":true'
_BYTES_PER_TOKEN = 4
_CAPACITY_BLOCKS = 100_000
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


class ApiAnswers:
    """The answers of one API, as bytes on the wire: that of chats, or that of plain prompts."""

    def __init__(self, tokens: int, *, chats: bool) -> None:
        self._tokens, self._chats = tokens, chats
        self.whole = _whole(_completion(tokens, chats=chats))
        self.pieces = [_chunk(event) for event in _events(tokens, chats=chats)]
        self.stream = _HEAD + b"".join(self.pieces) + _END
        self._with_ids: dict[int, list[bytes]] = {}

    def with_ids(self, prompt_tokens: int) -> list[bytes]:
        """The pieces of a stream that was asked for token ids, as `pieces`."""
        if prompt_tokens not in self._with_ids:
            events = _events(self._tokens, list(range(10_000, 10_000 + prompt_tokens)), chats=self._chats)
            self._with_ids[prompt_tokens] = [_chunk(event) for event in events]
        return self._with_ids[prompt_tokens]


class Answers:
    """All answers. `prepare` sets those to a POST."""

    def __init__(self) -> None:
        self.prepare(16, 0.0)

    def prepare(self, tokens: int, pace_s: float) -> None:
        self.pace_s = pace_s
        self._chat, self._plain = ApiAnswers(tokens, chats=True), ApiAnswers(tokens, chats=False)

    def of(self, url: bytes) -> ApiAnswers:
        return self._plain if url.startswith(b"/v1/completions") else self._chat

    def get(self, path: str) -> bytes:
        if path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "parent": None}
            return _whole(orjson.dumps({"object": "list", "data": [card]}))
        if path == "/metrics":
            return _whole(_metrics(), b"text/plain")
        if path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
            return _whole(orjson.dumps({"model_path": MODEL, "served_model_name": MODEL, "version": "0.32.0"}))
        if path in ("/health", "/health_generate"):
            return _whole(b"")
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def _whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 100,
        "total_tokens": 100 + tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _base(kind: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": kind,
        "created": 1_700_000_000,
        "model": MODEL,
    }


def _completion(tokens: int, *, chats: bool) -> bytes:
    """A complete answer in vLLM's form."""
    text = " token" * tokens
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
    said = {"message": message} if chats else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    kind = "chat.completion" if chats else "text_completion"
    return orjson.dumps({**_base(kind), "choices": [choice], "usage": _usage(tokens)})


def _events(tokens: int, prompt_ids: list[int] | None = None, *, chats: bool) -> list[bytes]:
    """A stream in vLLM's form: the role of a chat, an event for each token, usage, the end mark. With the ids of a
    prompt, those of the answer are told, too."""
    base = _base("chat.completion.chunk" if chats else "text_completion")
    said = {"delta": {"content": " token"}} if chats else {"text": " token"}

    def event(document: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(document) + b"\n\n"

    def of_choice(number: int) -> bytes:
        reason = "length" if number == tokens - 1 else None
        choice: dict[str, Any] = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        choice["token_ids"] = None if prompt_ids is None else [20_000 + number]
        if not chats:
            choice["prompt_token_ids"] = None if number else prompt_ids
        return event({**base, "choices": [choice]})

    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events = [event({**base, "choices": [opening], "prompt_token_ids": prompt_ids})] if chats else []
    events += map(of_choice, range(tokens))
    return [*events, event({**base, "choices": [], "usage": _usage(tokens)}) + b"data: [DONE]\n\n"]


_STARTED_S = time.time()


def _metrics() -> bytes:
    info = f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{_CAPACITY_BLOCKS}"}} 1.0'
    return f"process_start_time_seconds {_STARTED_S:.0f}\n{info}\n".encode()


class Protocol(asyncio.Protocol):
    """One connection. httptools parses its requests. Of a body, only the words that ask for a stream are read."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # some proxies try HTTP/2 first
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_message_begin(self) -> None:
        self._url = b""
        self._streams = self._asks_ids = False
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        # The words are at the beginning or at the end, because proxies append their own fields.
        ends = body if len(body) < 8192 else body[:4096] + body[-4096:]
        self._streams = self._streams or any(mark in ends for mark in _STREAM)
        self._asks_ids = self._asks_ids or _IDS in ends
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._transport.write(self._answers.get(urlsplit(self._url.decode()).path))
        elif self._url.startswith(b"/canned"):
            self._configure()
        else:
            self._answer()

    def _configure(self) -> None:
        asked = parse_qs(urlsplit(self._url.decode()).query)
        self._answers.prepare(int(asked["tokens"][0]), float(asked["pace_ms"][0]) / 1000)
        self._transport.write(_whole(b"{}"))

    def _answer(self) -> None:
        answers = self._answers.of(self._url)
        if not self._streams:
            self._transport.write(answers.whole)
            return
        pieces = answers.with_ids(self._body_bytes // _BYTES_PER_TOKEN) if self._asks_ids else answers.pieces
        if self._answers.pace_s:
            self._transport.write(_HEAD + pieces[0])
            self._next(pieces, 1)
        elif self._asks_ids:
            self._transport.write(b"".join((_HEAD, *pieces, _END)))
        else:
            self._transport.write(answers.stream)

    def _next(self, pieces: list[bytes], index: int) -> None:
        """Sends each token in its own write, one every `pace_s`."""
        self._timer = asyncio.get_running_loop().call_later(self._answers.pace_s, self._send, pieces, index)

    def _send(self, pieces: list[bytes], index: int) -> None:
        if index < len(pieces) - 1:
            self._transport.write(pieces[index])
            self._next(pieces, index + 1)
        else:
            self._transport.write(pieces[-1] + _END)


async def _serve(ports: list[int]) -> None:
    answers = Answers()
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Protocol(answers), "127.0.0.1", port, backlog=2048) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead.canned", description=__doc__)
    parser.add_argument("--ports", required=True, help="comma separated; every port gives the same answers")
    options = parser.parse_args()
    uvloop.run(_serve([int(port) for port in options.ports.split(",")]))


if __name__ == "__main__":
    main()
