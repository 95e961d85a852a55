"""A gateway in the test's own process, in front of a replica. The test writes the replica's answers byte by byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from uvicorn.server import ServerState

from gateway.app import Gateway
from gateway.http.protocol import HttpProtocol
from gateway.settings.gateway_settings import GatewaySettings
from gateway.tls import Certificates
from gateway.tracing.otel_variables import NO_VARIABLES
from tests.polling import eventually

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hello, " * 1000}]}


def head(*lines: str, status: int = 200) -> bytes:
    """The head of an answer, with these headers."""
    return "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode()


def whole(body: bytes, *lines: str, status: int = 200) -> bytes:
    """An answer of known length."""
    return head("content-type: application/json", f"content-length: {len(body)}", *lines, status=status) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedReplica:
    """Answers every POST as `answer` says. Other requests get the answers of an engine without metrics."""

    def __init__(self) -> None:
        self.answer: Answer = self._hello
        self.asked = 0
        """The number of POSTs that arrived."""
        self.head, self.body = b"", b""
        """Of the last one."""
        self.hung_up = asyncio.Event()
        """Set when the gateway closes a connection during a POST."""
        self.url = ""
        self.cards: list[dict[str, Any]] = [{"id": "m", "object": "model"}]
        """What it says that it serves."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()

    def says(self, *pieces: bytes | asyncio.Event) -> None:
        """Answers with these bytes, waits at each event until it is set, and closes the connection at the end."""

        async def answer(writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                else:
                    await piece.wait()

        self.answer = answer

    async def _hello(self, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b"{}"))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        has_post = False
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            if request.startswith(b"POST"):
                length = re.search(rb"(?i)content-length: (\d+)", request)
                self.body = await reader.readexactly(int(length[1]) if length else 0)
                self.head, has_post = request, True
                self.asked += 1
                await self.answer(writer)
                await writer.drain()
            elif request.startswith(b"GET /v1/models"):
                models = orjson.dumps({"object": "list", "data": self.cards})
                writer.write(whole(models, "connection: close"))
            else:
                writer.write(whole(b"{}", "connection: close", status=200 if b" /health" in request else 404))
        except (ConnectionError, asyncio.IncompleteReadError):
            if has_post:
                self.hung_up.set()
        finally:
            writer.close()


@asynccontextmanager
async def gateway_before(replica: ScriptedReplica, **settings: Any) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway with this one replica and without a store, and the gateway's URL."""
    given = {"redis": {"url": "redis://127.0.0.1:1"}, "security": {"allowed_paths": ["/v1"]}, **settings}
    configured = {"replicas": [{"id": "r0", "url": replica.url}], **given}
    gateway = Gateway(GatewaySettings.model_validate(configured), Certificates(), NO_VARIABLES)
    await gateway.start()
    state, write_s = ServerState(), gateway.settings.timeouts.write_s
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(gateway.answer, state, write_s), "127.0.0.1", 0
    )
    try:
        await eventually(lambda: gateway.fleet.served)
        yield gateway, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await gateway.stop()


@dataclass
class Relayed:
    """A client, a gateway and a scripted replica."""

    http: httpx.AsyncClient
    gateway: Gateway
    replica: ScriptedReplica

    async def ask(self, path: str = CHAT, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json={**ASKED, **fields})

    async def stream(self, path: str = CHAT) -> httpx.Response:
        return await self.ask(path, stream=True)
