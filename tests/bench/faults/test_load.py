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
    writer.write(
        EVENTS + b'data: {"error": {"code": "stream_broken"}}\n\ndata: [DONE]\n\n' if streams else HEAD + b"\r\n{"
    )


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


async def test_an_answer_that_waited_tells_for_how_long_and_how_it_was_decided(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    async def waited(writer: asyncio.StreamWriter, streams: bool) -> None:
        head = HEAD.replace(b"state=exact", b"state=exact; stored_tokens=16; waited_ms=1250")
        events = b"content-type: text/event-stream\r\n\r\ndata: [DONE]\n\n"
        writer.write(head + (events if streams else b"content-length: 2\r\n\r\n{}"))

    seen = await asked(http, await serve(waited))
    assert {(one.end, one.state, one.waited_s) for one in seen} == {(End.COMPLETE, "exact", 1.25)}
    assert {one.waited_s for one in await asked(http, await serve(_whole))} == {0.0}


async def test_of_a_fixed_number_of_clients_each_waits_for_the_end_of_its_request(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    gate = asyncio.Event()

    async def held(writer: asyncio.StreamWriter, streams: bool) -> None:
        await gate.wait()
        await _whole(writer, streams)

    load = Load(http, Balancer([await serve(held)]), clients=3)
    load.start()
    await eventually(lambda: load.in_flight == 3)
    gate.set()
    await eventually(lambda: len(load.seen) >= 6)
    load.stop()
    await load.finish(5)
    assert {one.end for one in load.seen} == {End.COMPLETE}


async def test_a_refusal_is_told_by_status_and_code(http: aiohttp.ClientSession, serve: Serve) -> None:
    seen = await asked(http, await serve(_busy))
    assert {(one.end, one.detail) for one in seen} == {(End.STATUS, "429 gateway_overloaded")}


async def test_a_stream_with_an_error_event_has_failed(http: aiohttp.ClientSession, serve: Serve) -> None:
    seen = await asked(http, await serve(_error))
    assert (End.ERROR_EVENT, "stream_broken") in {(one.end, one.detail) for one in seen}


async def test_a_connection_that_breaks_is_told_from_an_answer_that_had_begun(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    seen = await asked(http, await serve(_cut))
    assert {one.end for one in seen} == {End.BROKEN}
    assert {one.head_s is not None for one in seen} == {True, False}


async def test_a_refused_connection_is_tried_at_the_next_gateway_and_nothing_else_is(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    seen = await asked(http, gone, await serve(_whole))
    assert {(one.end, one.gateway) for one in seen} == {(End.COMPLETE, 1)}
    assert {(one.end, one.gateway) for one in await asked(http, gone)} == {(End.REFUSED, None)}
    seen = await asked(http, await serve(_cut), await serve(_whole))
    assert {(one.end, one.gateway) for one in seen} == {(End.BROKEN, 0), (End.COMPLETE, 1)}


async def test_what_has_no_end_when_the_load_ends_is_unanswered(http: aiohttp.ClientSession, serve: Serve) -> None:
    arrived = asyncio.Event()

    async def never(_: asyncio.StreamWriter, __: bool) -> None:
        arrived.set()
        await asyncio.sleep(60)

    load = Load(http, Balancer([await serve(never)]))
    load.start()
    await arrived.wait()
    load.stop()
    await load.finish(0)
    assert {one.end for one in load.seen} == {End.UNANSWERED}


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
