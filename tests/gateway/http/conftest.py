"""A server whose requests a test's handler answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from uvicorn.server import ServerState

from gateway.http.exchange import Exchange
from gateway.http.protocol import HttpProtocol

Handler = Callable[[Exchange], Awaitable[None]]
CLOSE = b"connection: close\r\n"


class Served:
    """A server whose requests the test's handler answers."""

    def __init__(self) -> None:
        self.state = ServerState()
        self.handle: Handler = echo
        self.port = 0

    async def answer(self, exchange: Exchange) -> None:
        await self.handle(exchange)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def says(self, request: bytes) -> bytes:
        """Everything that the server says to these bytes, until it closes or the client's half is closed."""
        async with self.client() as (reader, writer):
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 5)


async def echo(exchange: Exchange) -> None:
    """Says what it was asked."""
    body = b""
    while piece := await exchange.receive():
        body += piece
    said = f"{exchange.method} {exchange.path} {exchange.query.decode()} {len(body)}".encode()
    exchange.whole(200, [(b"x-mark", b"1")], said)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(served.answer, served.state), "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    yield served
    server.close()
    for connection in list(served.state.connections):
        connection._transport.abort()  # type: ignore[union-attr]
