"""One HTTP request to the replica: parses it, applies faults, and answers it, whole or streamed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.engine import Generation
from gateway.simulator.errors import RequestRefused, bad_request
from gateway.simulator.faults import OF_REQUESTS, Fault, close_connection, crash, hang
from gateway.simulator.nixl import Fetched
from gateway.simulator.prompt import EnginePrompt
from gateway.simulator.protocol import Parse
from gateway.simulator.replica import SimReplica
from gateway.simulator.sequence import EventTag

_REMEMBERED_HEADERS = ("X-data-parallel-rank", "X-Session-ID", "X-Request-Id", "X-Vllm-Priority", "Authorization")
_EVENT_STREAM = "text/event-stream; charset=utf-8"


class Dialect(Protocol):
    """The format of one API's answer: a document, or a stream, of which each method returns complete SSE bytes."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The finished answer as one document."""

    def head(self) -> bytes:
        """Sent at once, before anything is computed."""
        return b""

    def piece(self, choice: int, at: int) -> bytes:
        """The token at this place of a choice's answer."""

    def tail(self, generation: Generation) -> bytes:
        """Sent after the last token."""


@dataclass(slots=True)
class Call:
    """A parsed inference request. `request_id` is the caller's X-Request-Id, or random."""

    replica: SimReplica
    request: web.Request
    body: dict[str, Any]
    request_id: str
    fault: Fault | None = None
    fetched: Fetched | None = None
    """What another server has computed for it."""

    async def fetch(self) -> None:
        """Takes the blocks of its prompt from another server, if it names one. A stream begins before that, so the
        error is one of its events. Else raises a 500."""
        reference, connector = self.body.get("kv_transfer_params") or {}, self.replica.nixl or self.replica.mooncake
        if self.replica.pd_role is not None:
            self.replica.pd_role.check(self.request.path, reference)
        if connector is None or not reference.get("do_remote_prefill"):
            return
        try:
            self.fetched = await connector.fetch(reference)
        except RequestRefused:
            if not self.body.get("stream"):
                raise
            self.fault = Fault("error", after_tokens=0)

    def reference(self, generation: Generation) -> dict[str, Any] | None:
        """What its answer gives to the server that is to decode, if it asks for that."""
        asked, replica = self.body.get("kv_transfer_params") or {}, self.replica
        if not asked.get("do_remote_decode"):
            return None
        if replica.mooncake is not None:
            replica.mooncake.give(asked, generation)
        return None if replica.nixl is None else replica.nixl.give(self.request_id, generation, self.request.url)

    def generate(self, prompts: Sequence[EnginePrompt], answers: list[GeneratedAnswer]) -> Generation:
        """The generation of this call, remembered in /sim/state but not started. The caller has limited its answers by
        `token_limit`. Raises a 400 if a prompt is empty or too long, and a 503 while the engines are paused."""
        headers = self.request.headers
        xargs = fields.mapping(self.body, "vllm_xargs")
        session_id = (  # in vLLM's order
            fields.text(self.body, "session_id") or headers.get("X-Session-ID") or fields.text(xargs, "session_id")
        )
        tag = EventTag(session_id, xargs.get("kv_cache_report_mode") == "full")
        for prompt in prompts:
            self.replica.check_length(prompt, room=0)
        self.replica.sleep.refuse_if_paused()
        engine = self.replica.engine_for(headers)
        if self.fetched is not None:
            answers[:] = map(self.fetched.answer, answers)
        generation = Generation(engine, prompts, answers, bool(self.body.get("stream")), tag)
        if self.fetched is not None:
            generation.fetched(self.fetched.tokens, self.fetched.cached_tokens)
        told = {
            "request_id": self.request_id,
            "path": self.request.path,
            "session_id": tag.session_id,
            "headers": {name: headers[name] for name in _REMEMBERED_HEADERS if name in headers},
            "body_keys": list(self.body),
            "vllm_xargs": xargs,
        }
        self.replica.recent.append((told, generation))
        return generation

    async def answer(self, generation: Generation, dialect: Dialect) -> web.StreamResponse:
        """Run a generation and answer with it, whole or streamed as the request wishes."""
        if self.body.get("stream"):
            return await self.stream(generation, dialect)
        await self.complete(generation)
        return await self.respond(dialect.whole(generation))

    async def respond(self, payload: dict[str, Any]) -> web.StreamResponse:
        """Answer with JSON, or with half of it if a fault cuts the connection."""
        await self.replica.faults.until_free()
        body = orjson.dumps(payload)
        headers = {"X-Request-Id": self.request_id}
        if self.fault is None or self.fault.mode != "cut":
            return web.Response(body=body, content_type="application/json", headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(self.request)
        await response.write(body[: len(body) // 2])
        return await close_connection(self.request)

    async def complete(self, generation: Generation) -> None:
        """Run a generation whose answer is sent whole."""
        await self._be_slow()
        await generation.completion()

    async def stream(self, generation: Generation, dialect: Dialect) -> web.StreamResponse:
        """Answer with server-sent events, token by token. If the client goes away, the generation is aborted."""
        response = web.StreamResponse(headers={"Content-Type": _EVENT_STREAM, "X-Request-Id": self.request_id})
        await response.prepare(self.request)
        if head := dialect.head():
            await response.write(head)
        strike_at = self.fault.strikes_at_token if self.fault is not None else None
        sent = 0
        out: list[bytes] = []
        try:
            await self._be_slow()
            generation.start()
            while not generation.finished:
                await generation.progress()
                new = list(generation.new_tokens())[: None if strike_at is None else strike_at - sent]
                out += [dialect.piece(choice, at) for choice, at in new]
                sent += len(new)
                if sent == strike_at:
                    return await self._strike(response, b"".join(out))
                await self.replica.faults.until_free()
                if out and not generation.finished:
                    await response.write(b"".join(out))
                    out.clear()
            if strike_at is not None:
                return await self._strike(response, b"".join(out))
            out.append(dialect.tail(generation))
            await response.write_eof(b"".join(out))
        finally:
            generation.close()
        return response

    async def _be_slow(self) -> None:
        if self.fault is not None and self.fault.mode == "slow":
            await asyncio.sleep(self.fault.seconds)

    async def _strike(self, response: web.StreamResponse, last: bytes) -> web.StreamResponse:
        """Send the `last` bytes of a stream, then break it as the fault says."""
        assert self.fault is not None
        if last:
            await response.write(last)
        match self.fault.mode:
            case "truncate":
                await response.write_eof()
            case "error":
                await response.write_eof(self._last_words(self.fault.refusal()))
            case "hang":
                await hang()
            case "crash":
                await asyncio.sleep(0)  # the loop may delay writes until this task yields
                crash()
            case _:
                await close_connection(self.request)
        return response

    def _last_words(self, refused: RequestRefused) -> bytes:
        """The end of a stream whose engine has failed."""
        data = b"data: " + refused.body_for(self.request.path) + b"\n\n"
        return b"event: error\n" + data if self.request.path == "/v1/messages" else data + b"data: [DONE]\n\n"


_OF_SERVER = ("/tokenize", "/v1/messages/count_tokens")
"""The server answers these without its engine, so faults leave them alone."""


def event(kind: str, data: dict[str, Any]) -> bytes:
    """A server-sent event that names its kind."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def inference(replica: SimReplica, handler: Callable[[Call], Awaitable[web.StreamResponse]], parse: Parse) -> Handler:
    """The aiohttp handler of an inference endpoint. It counts the request, applies faults, reads the body by `parse`,
    and refuses bad requests."""

    async def handle(request: web.Request) -> web.StreamResponse:
        await replica.faults.until_free()
        if (role := replica.pd_role) is None:
            return await answered(request)
        if (refusal := role.refusal(request.path, request.headers)) is not None:
            return web.json_response(refusal, status=409)
        with role.admitted():
            return await answered(request)

    async def answered(request: web.Request) -> web.StreamResponse:
        replica.num_requests += 1
        fault = replica.faults.take(*OF_REQUESTS) if request.path not in _OF_SERVER else None
        try:
            if fault is not None and fault.strikes_first:
                await _strike_first(request, fault)
            request_id = request.headers.get("X-Request-Id") or os.urandom(16).hex()
            body = await read_json(request)
            replica.faults.block_if_long(request.content_length or 0)
            await replica.faults.until_free()
            call = Call(replica, request, parse(body), request_id, fault)
            await call.fetch()
            return await handler(call)
        except RequestRefused as refused:
            return _refusal(request, refused)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # vLLM answers these for odd input
            return _refusal(request, bad_request(str(error)))

    return handle


def control(
    replica: SimReplica, handler: Callable[[SimReplica, web.Request], Awaitable[web.StreamResponse]]
) -> Handler:
    """The aiohttp handler of any other endpoint."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if not request.path.startswith("/sim/"):
            await replica.faults.until_free()
        try:
            return await handler(replica, request)
        except RequestRefused as refused:
            return _refusal(request, refused)

    return handle


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body, a JSON object; raises a 400."""
    if not request.headers.get("Content-Type", "").startswith("application/json"):
        raise bad_request("only application/json is allowed")
    return fields.json_object(await request.read())


async def _strike_first(request: web.Request, fault: Fault) -> None:
    if fault.mode == "error":
        raise fault.refusal()
    if fault.mode == "reset":
        await close_connection(request, reset=True)
    await hang()


def _refusal(request: web.Request, refused: RequestRefused) -> web.Response:
    return web.Response(status=refused.status, body=refused.body_for(request.path), content_type="application/json")
