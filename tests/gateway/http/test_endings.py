"""Clients that close one or both directions, and clients that do not read their answers."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.http.exchange import ClientGone, Exchange
from tests.gateway.http.conftest import CLOSE, Served, Wire, echo
from tests.polling import eventually

GET = b"GET /get HTTP/1.1\r\nhost: x\r\n\r\n"
PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"


class Waiting:
    """A handler that answers when the test lets it, and records whether it was stopped."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.is_stopped = False

    async def __call__(self, exchange: Exchange) -> None:
        exchange.stops_when_gone = True
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.is_stopped = True
            return
        if exchange.path == "/stream":
            exchange.start(200, [])
            exchange.write(b"one")
            await asyncio.sleep(0.05)
            exchange.write(b"two")
            exchange.end()
        else:
            await echo(exchange)


async def test_a_client_that_has_closed_its_half_gets_all_answers_that_it_asked_for(served: Served) -> None:
    served.handle = waiting = Waiting()
    async with served.client() as (reader, writer):
        writer.write(GET * 3 + b"GET /unfinished HTT")
        writer.write_eof()
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == PROBE
        waiting.go_on.set()
        said = await asyncio.wait_for(reader.read(), 5)
    assert said.count(b"200 OK") == 3
    await eventually(lambda: not served.state.connections)


@pytest.mark.parametrize("request_bytes", [GET, GET * 2, b"GET /get HTTP/1.0\r\n\r\n"], ids=["one", "two", "HTTP/1.0"])
async def test_a_client_that_has_closed_is_noticed(served: Served, request_bytes: bytes) -> None:
    served.handle = waiting = Waiting()
    async with served.client() as (_, writer):
        writer.write(request_bytes)
        await eventually(lambda: served.state.tasks)
    await eventually(lambda: waiting.is_stopped)
    await eventually(lambda: not served.state.connections)


async def test_a_client_of_http_1_0_is_sent_no_interim_response(served: Served) -> None:
    served.handle = waiting = Waiting()
    async with served.client() as (reader, writer):
        writer.write(b"GET /get HTTP/1.0\r\n\r\n")
        await eventually(lambda: served.state.tasks)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
    await eventually(lambda: waiting.is_stopped)


async def test_a_client_that_closes_within_a_stream_is_noticed_though_nothing_more_is_written(served: Served) -> None:
    stopped = asyncio.Event()

    async def silent(exchange: Exchange) -> None:
        exchange.stops_when_gone = True
        exchange.start(200, [])
        exchange.write(b"one")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.set()

    served.handle = silent
    async with served.client() as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"one\r\n")
    await asyncio.wait_for(stopped.wait(), 5)


async def test_a_client_that_does_not_read_its_stream_is_given_up(served: Served) -> None:
    served.write_s = 0.2
    stopped = asyncio.Event()

    async def flood(exchange: Exchange) -> None:
        exchange.stops_when_gone = True
        exchange.start(200, [])
        try:
            while True:
                if not exchange.write(b"x" * 2**16):
                    await exchange.drained()
        except asyncio.CancelledError:
            assert exchange.is_gone
            stopped.set()

    served.handle = flood
    async with served.client() as (_, writer):
        writer.write(GET)
        await asyncio.wait_for(stopped.wait(), 20)
        assert not writer.is_closing()
    await eventually(lambda: not served.state.connections)


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_client_that_does_not_read_a_whole_answer_is_given_up(served: Served, keeps: bool) -> None:
    served.write_s = 0.2

    async def large(exchange: Exchange) -> None:
        exchange.whole(200, [], b"x" * 2**26)

    served.handle = large
    async with served.client() as (reader, writer):
        writer.write(GET if keeps else GET[:-2] + CLOSE + b"\r\n")
        await reader.readexactly(2**16)
        assert len(served.state.connections) == 1
        await eventually(lambda: not served.state.connections)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(2**26)


async def test_a_client_that_takes_anything_at_all_is_waited_for(served: Served) -> None:
    served.write_s = 0.01
    connection, wire = served.connection(), Wire(unsent_bytes=[70_000, 69_999, 69_998, 69_000, 69_000, 1])
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.pause_writing()
    await eventually(lambda: wire.is_aborted)
    assert wire.unsent_bytes == [1]  # it is asked until it gives the same value twice
    connection.connection_lost(None)


async def test_what_is_added_meanwhile_does_not_hide_what_was_taken(served: Served) -> None:
    served.write_s = 0.01
    connection, wire = served.connection(), Wire(unsent_bytes=[70_000, 79_999, 79_999, 1])
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.pause_writing()
    connection.write(b"x" * 10_000)
    await eventually(lambda: wire.is_aborted)
    assert wire.unsent_bytes == [1]
    connection.connection_lost(None)


@pytest.mark.parametrize("how", ["in time", "refused"])
async def test_a_client_that_is_still_sending_gets_its_answer(served: Served, how: str) -> None:
    """The server reads everything that the client sends, and then ends the connection without a reset."""

    async def too_large(exchange: Exchange) -> None:
        exchange.whole(413, [(b"connection", b"close")], b"too large")

    served.handle = too_large
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n" if how == "in time" else b"no HTTP\r\n"
    async with served.client() as (reader, writer):
        writer.write(head + b"x" * 9_000_000)
        await writer.drain()
        said = await asyncio.wait_for(reader.read(), 5)
    assert said.endswith(b"too large") if how == "in time" else b"400 Bad Request" in said
    await eventually(lambda: not served.state.connections)


async def test_a_body_that_turns_out_to_be_malformed_is_refused_once(served: Served) -> None:
    """The body's reader learns that the client is gone, and the reader's answer is dropped."""
    ends = []

    async def reading(exchange: Exchange) -> None:
        try:
            while await exchange.receive():
                pass
        except ClientGone as error:
            ends.append(error)
        exchange.whole(200, [], b"never")

    served.handle = reading
    async with served.client() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await eventually(lambda: served.state.tasks)
        writer.write(b"no chunk\r\n")
        said = await asyncio.wait_for(reader.read(), 5)
    assert (said.count(b"HTTP/1.1 400 Bad Request"), said.count(b"200 OK"), len(ends)) == (1, 0, 1)


async def test_an_answer_to_a_client_that_is_gone_goes_nowhere(served: Served) -> None:
    ended = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        assert await exchange.receive() == b"x"
        with pytest.raises(ClientGone):
            await exchange.receive()
        exchange.whole(408, [(b"connection", b"close")], b"too late")
        ended.set()

    served.handle = late
    with capture_logs() as logs:
        async with served.client() as (_, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx")
            await eventually(lambda: served.state.tasks)
        await asyncio.wait_for(ended.wait(), 5)
        await eventually(lambda: not served.state.tasks)
    assert logs == []
