"""Clients' connections, byte by byte: input in any order and size, and the output."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.http import protocol as protocol_module
from gateway.http.exchange import ClientGone, Exchange
from tests.gateway.http.conftest import CLOSE, Served, echo, echo_after, undated
from tests.polling import eventually


async def test_a_request_is_answered_and_the_connection_kept(served: Served) -> None:
    async with served.client() as (reader, writer):
        for number in range(3):
            writer.write(b"POST /a%%20b?q=%d HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody" % number)
            head = await reader.readuntil(b"\r\n\r\n")
            assert undated(head) == b"HTTP/1.1 200 OK\r\nx-mark: 1\r\ncontent-length: 15\r\n\r\n"
            assert await reader.readexactly(15) == b"POST /a b q=%d 4" % number


async def test_wherever_the_bytes_are_split_the_request_is_the_same(served: Served) -> None:
    request = b"POST /x HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"content-length: 4\r\n\r\nbody"
    async with served.client() as (reader, writer):
        for index in range(len(request)):
            writer.write(request[index : index + 1])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"POST /x  4")


async def test_a_stream_is_chunked_and_without_chunks_for_http_1_0(served: Served) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"one")
        exchange.write(b"two")
        exchange.end()

    served.handle = stream
    said = await served.says(b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert said.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert b"transfer-encoding: chunked" in said
    said = await served.says(b"GET / HTTP/1.0\r\n\r\n")
    assert said.endswith(b"connection: close\r\n\r\nonetwo")
    assert b"chunked" not in said


async def test_head_gets_the_head(served: Served) -> None:
    said = await served.says(b"HEAD /x HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert said.endswith(b"content-length: 10\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "/socket"])
async def test_a_request_tells_where_it_comes_from(served: Served, host: str, tmp_path: Path) -> None:
    peers = []

    async def watching(exchange: Exchange) -> None:
        peers.append(exchange.peer)
        await echo(exchange)

    served.handle = watching
    loop = asyncio.get_running_loop()
    if host == "/socket":
        server = await loop.create_unix_server(served.connection, f"{tmp_path}/socket")
        _, writer = await asyncio.open_unix_connection(f"{tmp_path}/socket")
    else:
        server = await loop.create_server(served.connection, host, 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n")
    await eventually(lambda: len(peers) == 2)
    assert peers == ["" if host == "/socket" else host] * 2
    writer.close()
    server.close()


async def test_a_client_that_waits_for_it_is_told_to_go_on(served: Served) -> None:
    async with served.client() as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")


async def test_a_client_that_hangs_up_within_its_body_is_gone(served: Served) -> None:
    gone = asyncio.Event()

    async def reading(exchange: Exchange) -> None:
        try:
            while await exchange.receive():
                pass
        except ClientGone:
            gone.set()

    served.handle = reading
    async with served.client() as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nsome")
        await eventually(lambda: served.state.tasks)
    await asyncio.wait_for(gone.wait(), 5)


async def test_a_large_body_is_held_back_until_it_is_read(served: Served) -> None:
    begin = asyncio.Event()

    served.handle = echo_after(begin)
    size = 50 * 2**20
    async with served.client() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"content-length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.3)
        begin.set()
        assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"POST /  %d" % size)


async def test_a_handler_that_ends_in_the_middle_of_an_answer_ends_the_connection(served: Served) -> None:
    async def half(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"half")

    served.handle = half
    async with served.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"0\r\n\r\n")


async def test_an_idle_connection_is_closed_and_one_that_is_answered_is_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_module, "IDLE_S", 0.2)

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.6)
        await echo(exchange)

    served.handle = slow
    async with served.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.read(), 5)  # the server answers, and closes after the answer
    async with served.client() as (reader, writer):
        writer.write(b"GET / HT")  # a head that never ends
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_handler_that_fails_ends_the_connection_and_the_log_says_where(served: Served) -> None:
    async def fails(exchange: Exchange) -> None:
        raise ValueError(exchange.path)

    served.handle = fails
    with capture_logs() as logs:
        assert await served.says(b"GET /secret HTTP/1.1\r\nhost: x\r\n\r\n") == b""
    assert [(log["event"], log["error"]) for log in logs] == [("handler failed", "ValueError")]
    assert "secret" not in str(logs)


async def test_an_answer_without_a_body_has_no_length(served: Served) -> None:
    async def nothing(exchange: Exchange) -> None:
        exchange.whole(204, [], b"")

    served.handle = nothing
    said = await served.says(b"DELETE /x HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert undated(said) == b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"
