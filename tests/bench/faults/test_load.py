"""bench.faults: how a client's request ends, and how the balancer orders the gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from bench.faults.balancer import Balancer
from bench.faults.load import Load, client
from bench.faults.verdicts import End, Seen
from gateway.ops.local.ports import free_ports
from gateway.tasks import Tasks
from tests.polling import eventually

HEAD = b"HTTP/1.1 200 OK\r\nx-kvgate-replica: r1\r\nx-kvgate-decision: hit state=exact\r\nconnection: close\r\n"
EVENTS = HEAD + b"content-type: text/event-stream\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter, bool], Awaitable[None]]
Serve = Callable[[Answer], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers that send the given answer, and gives their URLs. The answer is told if a stream is wanted."""
    servers: list[asyncio.Server] = []

    async def start(answer: Answer) -> str:
        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            try:
                await answer(writer, b'"stream"' in await reader.readexactly(length))
            finally:
                writer.close()

        servers.append(await asyncio.start_server(one, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with client() as http:
        yield http


async def asked(http: aiohttp.ClientSession, *urls: str) -> list[Seen]:
    """Sends streamed and plain requests until 12 have ended."""
    load = Load(http, Balancer(urls))
    load.start()
    await eventually(lambda: len(load.seen) >= 12)
    load.stop()
    await load.finish(5)
    return load.seen


async def _whole(writer: asyncio.StreamWriter, streams: bool) -> None:
    writer.write(EVENTS + b"data: {}\n\ndata: [DONE]\n\n" if streams else HEAD + b"content-length: 2\r\n\r\n{}")


async def _busy(writer: asyncio.StreamWriter, _: bool) -> None:
    body = b'{"error": {"code": "gateway_overloaded"}}'
    writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def _error(writer: asyncio.StreamWriter, streams: bool) -> None:
    if streams:
        writer.write(EVENTS + b'data: {"error": {"code": "stream_broken"}}\n\ndata: [DONE]\n\n')
    else:
        await _busy(writer, streams)


async def _cut(writer: asyncio.StreamWriter, streams: bool) -> None:
    writer.write(HEAD + b"content-length: 100\r\n\r\ndata: {}\n\n" if streams else b"")
    await writer.drain()


async def test_whole_answers_are_complete_and_tell_who_answered_and_how_it_was_decided(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    for seen in await asked(http, await serve(_whole)):
        assert (seen.end, seen.replica, seen.state, seen.gateway) == (End.COMPLETE, "r1", "exact", 0)
        assert seen.head_s is not None
        assert seen.late_s < 1


async def test_a_stream_that_went_on_at_another_replica_is_known(http: aiohttp.ClientSession, serve: Serve) -> None:
    async def resumed(writer: asyncio.StreamWriter, streams: bool) -> None:
        if not streams:
            return await _whole(writer, streams)
        return writer.write(EVENTS + b"data: {}\n\n: x-kvgate-resumed: 1; exact\n\ndata: [DONE]\n\n")

    seen = await asked(http, await serve(resumed))
    assert {(one.end, one.streams) for one in seen if one.went_on} == {(End.COMPLETE, True)}
    assert all(one.went_on == one.streams for one in seen)


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (_error, {(End.ERROR_EVENT, True, "stream_broken"), (End.STATUS, True, "429 gateway_overloaded")}),
        (_cut, {(End.BROKEN, True, "ClientPayloadError"), (End.BROKEN, False, "ServerDisconnectedError")}),
    ],
)
async def test_it_is_told_how_an_answer_failed_and_whether_it_had_begun(
    http: aiohttp.ClientSession, serve: Serve, answer: Answer, ends: set[tuple[End, bool, str]]
) -> None:
    seen = await asked(http, await serve(answer))
    assert {(one.end, one.head_s is not None, one.detail) for one in seen} == ends


async def test_a_refused_connection_is_tried_at_the_next_gateway_and_nothing_else_is(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    seen = await asked(http, gone, await serve(_whole))
    assert {(one.end, one.gateway) for one in seen} == {(End.COMPLETE, 1)}
    assert {(one.end, one.gateway) for one in await asked(http, gone)} == {(End.REFUSED, None)}
    seen = await asked(http, await serve(_cut), await serve(_whole))
    assert {(one.end, one.gateway) for one in seen} == {(End.BROKEN, 0), (End.COMPLETE, 1)}


async def test_a_gateway_that_is_not_ready_or_was_taken_out_comes_last(http: aiohttp.ClientSession) -> None:
    """No gateway is running. The gateway that the balancer checks first comes last until all are checked."""
    balancer = Balancer([f"http://127.0.0.1:{port}" for port in free_ports(3)])
    assert {balancer.order()[0] for _ in range(3)} == {0, 1, 2}
    balancer.take_out(1)
    assert {balancer.order()[-1] for _ in range(3)} == {1}
    balancer.put_in(1)
    assert {balancer.order()[-1] for _ in range(3)} == {0, 1, 2}
    tasks = Tasks()
    tasks.spawn(balancer.look(http), "balancer")
    balancer.take_out(0)
    # If no gateway is ready, the balancer tries all in turn.
    await eventually(lambda: {balancer.order()[0] for _ in range(3)} == {0, 1, 2})
    await tasks.close()
