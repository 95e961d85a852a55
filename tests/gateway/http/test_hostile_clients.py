"""Clients that use HTTP wrongly, or against the server: other clients' answers do not suffer, and no memory leaks."""

from __future__ import annotations

import asyncio
import tracemalloc

from gateway.http.exchange import Exchange
from tests.gateway.http.conftest import CLOSE, Served, Wire, echo
from tests.polling import eventually


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
        said += await asyncio.wait_for(reader.read(), 5)
    answer, _, refusal = said.partition(b"3\r\none\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert refusal.startswith(b"HTTP/1.1 400 Bad Request")


async def test_nonsense_behind_a_request_is_not_its_answer(served: Served) -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.1)
        await echo(exchange)

    served.handle = slow
    said = await served.says(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n")
    answer, _, refusal = said.partition(b"GET /x  0")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert refusal.startswith(b"HTTP/1.1 400 Bad Request")


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
    said = await served.says(head + b"a: b\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert said.count(b"200 OK") == 2
    assert b"a" not in dict(seen[0].raw_headers)
    await eventually(lambda: not served.state.connections)
    async with served.client() as (_, writer):
        writer.write(head)
        await eventually(lambda: len(seen) == 3)
        writer.write((b"a: " + b"b" * 4000 + b"\r\n") * 40)
        await eventually(lambda: not served.state.connections)


async def test_a_body_in_tiny_chunks_takes_no_more_than_what_is_in_it(served: Served) -> None:
    begin = asyncio.Event()
    exchanges: list[Exchange] = []

    async def late(exchange: Exchange) -> None:
        exchanges.append(exchange)
        await begin.wait()
        await echo(exchange)

    served.handle = late
    connection, wire = served.connection(), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    await eventually(lambda: exchanges)
    chunks = b"2\r\nxy\r\n" * 10_000
    tracemalloc.start()
    try:
        for _ in range(10):
            connection.data_received(chunks)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1.5 * 200_000
    begin.set()
    connection.data_received(b"0\r\n\r\n")
    await eventually(lambda: wire.said.endswith(b"POST /x  200000"))
    connection.connection_lost(None)
