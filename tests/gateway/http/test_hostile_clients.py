"""Clients that get HTTP wrong, or use it against the server: nobody else's answer suffers, and nothing grows."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http import protocol as protocol_module
from gateway.http.exchange import Exchange
from tests.gateway.http.conftest import CLOSE, Served, echo
from tests.polling import eventually


async def test_a_client_that_asks_on_without_reading_is_answered_when_it_reads(served: Served) -> None:
    begun = 0

    async def large(exchange: Exchange) -> None:
        nonlocal begun
        begun += 1
        exchange.whole(200, [], b"x" * 2**20)

    served.handle = large
    async with served.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 99 + b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
        await eventually(lambda: begun > 0)
        before = -1
        while before != begun:
            before = begun
            await asyncio.sleep(0.05)
        assert begun < 50
        said = await asyncio.wait_for(reader.read(), 30)
    assert (begun, said.count(b"HTTP/1.1 200 OK")) == (100, 100)


async def test_a_client_that_stops_reading_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "IDLE_S", 0.2)

    async def large(exchange: Exchange) -> None:
        exchange.whole(200, [], b"x" * 2**26)

    served.handle = large
    async with served.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readexactly(2**16)
        assert len(served.state.connections) == 1
        await eventually(lambda: not served.state.connections)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(2**26)


async def test_nonsense_behind_a_request_does_not_get_into_its_answer(served: Served) -> None:
    go_on = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"one")
        await go_on.wait()
        exchange.end()

    served.handle = stream
    async with served.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        said = await reader.readuntil(b"one\r\n")
        writer.write(b"nonsense\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        go_on.set()
        said += await asyncio.wait_for(reader.read(), 5)  # the last that this connection says
    assert said.endswith(b"3\r\none\r\n0\r\n\r\n")


async def test_nonsense_behind_a_request_is_not_its_answer(served: Served) -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.1)
        await echo(exchange)

    served.handle = slow
    said = await served.says(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.endswith(b"GET /x  0")


async def test_a_body_and_the_next_head_in_one_read_are_not_taken_for_one_long_head(served: Served) -> None:
    async with served.client() as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 70000\r\n\r\n" + b"x" * 70_000 + b"POST /b HT")
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)


async def test_trailers_are_no_headers_and_not_without_end(served: Served) -> None:
    head = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    seen: list[Exchange] = []

    async def watching(exchange: Exchange) -> None:
        seen.append(exchange)
        await echo(exchange)

    served.handle = watching
    said = await served.says(head + b"a: b\r\n\r\n" + b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert said.count(b"200 OK") == 2
    assert b"a" not in dict(seen[0].raw_headers)
    await eventually(lambda: not served.state.connections)
    async with served.client() as (_, writer):
        writer.write(head)
        await eventually(lambda: len(seen) == 3)
        writer.write((b"a: " + b"b" * 4000 + b"\r\n") * 40)
        await eventually(lambda: not served.state.connections)


@pytest.mark.parametrize("apart", [False, True])
async def test_a_request_that_offers_an_upgrade_keeps_its_body(served: Served, apart: bool) -> None:
    """As Java's client does by itself; and what looks like a request in its body is none."""
    body = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: \r\n"
    async with served.client() as (reader, writer):
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
        if apart:
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.write(body + b"GET /next HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
        said = await asyncio.wait_for(reader.read(), 5)
    assert said.count(b"200 OK") == 2
    assert b"POST /x  %d" % len(body) in said
    assert said.endswith(b"GET /next  0")
