"""A connection that was kept may end while the next request is on its way. Nothing was wrong with that request."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

import pytest

from gateway.upstream import Upstream, UpstreamError
from tests.gateway.upstream.conftest import RawReplica, rest

LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 4\r\nconnection: close\r\n\r\nlate"


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def ask(upstream: Upstream, raw: RawReplica, has_effects: bool = False) -> bytes:
    return await rest(await upstream.send("POST", raw.url, "/v1/x", {}, [b"{}"], has_effects))


def answer_first(raw: RawReplica, then: Callable[[asyncio.StreamWriter], None]) -> None:
    """Each connection answers one request, and ends at the next one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        assert await reader.readexactly(2) == b"{}"
        writer.write(raw.reply)
        await raw.head(reader)
        then(writer)

    raw.serve = serve


@pytest.mark.parametrize(
    "ends",
    [lambda writer: writer.close(), reset, lambda writer: writer.write(LATE)],
    ids=["closed", "reset", "told that no request came"],
)
async def test_a_request_that_meets_its_end_is_sent_once_more_on_a_new_one(
    raw: RawReplica, upstream: Upstream, ends: Callable[[asyncio.StreamWriter], None]
) -> None:
    answer_first(raw, ends)
    assert [await ask(upstream, raw) for _ in range(3)] == [b"hi"] * 3
    assert (raw.connections, len(raw.heads)) == (3, 5)


async def test_when_all_kept_connections_are_dead_one_new_one_is_enough(raw: RawReplica, upstream: Upstream) -> None:
    answer_first(raw, reset)
    await asyncio.gather(*(ask(upstream, raw) for _ in range(4)))
    assert (raw.connections, await ask(upstream, raw), raw.connections) == (4, b"hi", 5)


async def test_a_new_connection_that_ends_is_a_failure(raw: RawReplica, upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        if raw.connections == 1:
            await reader.readexactly(2)
            writer.write(raw.reply)
            await raw.head(reader)

    raw.serve = serve
    assert await ask(upstream, raw) == b"hi"
    with pytest.raises(UpstreamError) as failure:
        await ask(upstream, raw)
    assert (failure.value.reason, raw.connections) == ("reset", 2)


async def test_an_answer_that_had_begun_is_not_asked_for_again(raw: RawReplica, upstream: Upstream) -> None:
    def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")

    answer_first(raw, half)
    assert await ask(upstream, raw) == b"hi"
    with pytest.raises(UpstreamError) as failure:
        await ask(upstream, raw)
    assert (failure.value.reason, raw.connections) == ("reset", 1)


async def test_a_request_with_effects_is_never_sent_on_a_kept_connection(raw: RawReplica, upstream: Upstream) -> None:
    """If such a connection ended, nobody would know whether the request was executed."""
    answer_first(raw, reset)
    assert [await ask(upstream, raw, has_effects=True) for _ in range(3)] == [b"hi"] * 3
    assert (raw.connections, len(raw.heads)) == (3, 3)
    assert len(upstream._origins[raw.url]._idle) == 1, "each takes the place of the one before"


@pytest.mark.parametrize(("told", "connections"), [("timeout=0, max=9", 2), ("max=9, Timeout = 60", 1)])
async def test_a_connection_is_kept_no_longer_than_its_server_says(
    raw: RawReplica, upstream: Upstream, told: str, connections: int
) -> None:
    raw.reply = f"HTTP/1.1 200 OK\r\nKeep-Alive: {told}\r\ncontent-length: 2\r\n\r\nhi".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await raw.head(reader)
            await reader.readexactly(2)
            writer.write(raw.reply)

    raw.serve = serve
    assert [await ask(upstream, raw) for _ in range(2)] == [b"hi"] * 2
    assert raw.connections == connections
