"""A replica made of bytes. The test decides what it sends, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.upstream import Answer, Upstream

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawReplica:
    """Serves each connection with the coroutine that the test sets, and counts connections."""

    def __init__(self) -> None:
        self.serve: Serve = self._answer_each
        self.connections = 0
        self.heads: list[bytes] = []
        self.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        """Reads one request without a body."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        return head

    async def answer_once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request on each connection. The next one gets no answer, and the connection closes."""
        await self.head(reader)
        writer.write(self.reply)
        await self.head(reader)

    async def _answer_each(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.head(reader)
            writer.write(self.reply)


async def rest(answer: Answer) -> bytes:
    """The rest of an answer."""
    assert await answer.gathered(2**30, lambda _: True)
    return answer.take()


@pytest.fixture
async def raw() -> AsyncIterator[RawReplica]:
    replica = RawReplica()
    await replica.start()
    yield replica
    await replica.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    client = Upstream(300, "secret")
    yield client
    await client.close()
