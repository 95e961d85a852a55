"""KVGate also serves servers that speak OpenAI's API and are not vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from aiohttp import web

from gateway.ops.local.ports import free_ports
from tests.cluster.clients import ask, is_complete, prose
from tests.cluster.gateways import kvgate
from tests.web_server import serving

Server = TypeVar("Server", bound="ForeignServer")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ForeignServer:
    """It lists its model without a root, has no /health, serves /metrics as HTML, and never sends usage."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "sim", "object": "model"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="<html><body><h1>All is well</h1></body></html>", content_type="text/html")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": self.name}, "finish_reason": "stop"}
            return web.json_response({"id": "1", "object": "chat.completion", "model": "sim", "choices": [choice]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        delta = {"index": 0, "delta": {"content": self.name}, "finish_reason": "stop"}
        chunk = {"id": "1", "object": "chat.completion.chunk", "model": "sim", "choices": [delta]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write_eof(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def listening(server: Server, health: Handler | None = None) -> AsyncIterator[Server]:
    """Runs the server. With `health` it also has a /health."""
    app = web.Application()
    if health is not None:
        app.router.add_get("/health", health)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/v1/chat/completions", server.chat)
    async with serving(app) as server.url:
        yield server


async def test_servers_that_are_not_vllm_are_fronted_with_prefix_routing(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    state_dir = ("--state-dir", str(tmp_path))
    async with listening(ForeignServer("one")) as one, listening(ForeignServer("two")) as two:
        fronted = [option for each in (one, two) for option in ("--replica", f"id={each.name},url={each.url}")]
        try:
            up = ("up", "--detach", *state_dir, "--gateways", "2", "--port", str(free_ports(1)[0]), *fronted)
            code, output = await kvgate(*up)
            assert code == 0, output
            urls = [gateway["url"] for gateway in json.loads((tmp_path / "cluster.json").read_text())["gateways"]]
            served = set()
            for n in range(4):
                text = prose(f"for strangers {n}")
                answers = [await ask(http, url, text, stream=stream) for url in urls for stream in (False, True)]
                assert all(is_complete(answer) for answer in answers)
                replicas = {answer.headers["x-kvgate-replica"] for answer in answers}
                assert len(replicas) == 1
                assert replicas.pop() in answers[0].text, "it answered with its name"
                assert int(answers[-1].headers["x-kvgate-matched-tokens"]) > 0
                served.add(answers[0].headers["x-kvgate-replica"])
            assert served == {"one", "two"}
            models = (await http.get(f"{urls[0]}/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["sim"]
        finally:
            await kvgate("down", *state_dir)
