"""A server whose requests a test's handler answers, on the event loop that gateways use."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
import uvloop
from uvicorn.server import ServerState

from gateway.http.exchange import Exchange
from gateway.http.protocol import HttpProtocol

Handler = Callable[[Exchange], Awaitable[None]]
CLOSE = b"connection: close\r\n"


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Event loops differ at a client's EOF and at a write after it, so these tests use uvloop."""
    return {"uvloop": uvloop.new_event_loop}


class Served:
    """A server whose requests the test's handler answers."""

    def __init__(self) -> None:
        self.state = ServerState()
        self.handle: Handler = echo
        self.write_s = 60.0
        self.port = 0

    async def answer(self, exchange: Exchange) -> None:
        await self.handle(exchange)

    def connection(self) -> HttpProtocol:
        """The server's side of a new connection."""
        return HttpProtocol(self.answer, self.state, self.write_s)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def says(self, request: bytes) -> bytes:
        """All bytes that the server answers to this request, until it closes."""
        async with self.client() as (reader, writer):
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 5)


class Wire:
    """A fake transport for a connection."""

    def __init__(self, unsent_bytes: Iterable[int] = ()) -> None:
        self.said = b""
        self.is_closed = self.is_aborted = False
        self.unsent_bytes = list(unsent_bytes)
        """The values that `get_write_buffer_size` returns, in order."""

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.said += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, _: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes.pop(0) if self.unsent_bytes else 0

    def write_eof(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def undated(said: bytes) -> bytes:
    """An answer without its Date header, if it has one."""
    return re.sub(rb"date: [^\r]+ GMT\r\n", b"", said)


async def echo(exchange: Exchange) -> None:
    """Answers with the request's own content."""
    body = b""
    while piece := await exchange.receive():
        body += piece
    said = f"{exchange.method} {exchange.path} {exchange.query.decode()} {len(body)}".encode()
    exchange.whole(200, [(b"x-mark", b"1")], said)


def echo_after(event: asyncio.Event) -> Handler:
    """A handler that waits for the event, and then answers with the request's own content."""

    async def waiting(exchange: Exchange) -> None:
        await event.wait()
        await echo(exchange)

    return waiting


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    server = await asyncio.get_running_loop().create_server(served.connection, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    yield served
    server.close()
    for connection in list(served.state.connections):
        connection._transport.abort()  # type: ignore[union-attr]
