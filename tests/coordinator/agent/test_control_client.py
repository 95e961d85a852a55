"""The agent's HTTP requests, and how it handles wrong answers."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from coordinator.agent.control_client import ControlClient, ControlError
from tests.gateway.upstream.conftest import RawReplica


@pytest.fixture
async def raw() -> AsyncIterator[RawReplica]:
    replica = RawReplica()
    await replica.start()
    yield replica
    await replica.close()


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    client = ControlClient("secret")
    yield client
    await client.close()


async def test_an_answer_has_a_status_and_a_body_and_its_connection_is_kept(
    raw: RawReplica, client: ControlClient
) -> None:
    raw.reply = b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nhi"
    assert await client.get(raw.url, 60) == (503, b"hi")
    raw.reply = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
    assert await client.get(raw.url, 60) == (302, b"")
    assert raw.connections == 1
    assert all(b"authorization: bearer secret" in head.lower() for head in raw.heads)


async def test_an_idle_connection_that_the_server_closes_meanwhile_is_no_failure(
    raw: RawReplica, client: ControlClient
) -> None:
    raw.serve = raw.answer_once
    assert await client.get(raw.url, 60) == (200, b"hi")
    assert await client.get(raw.url, 60) == (200, b"hi")
    assert raw.connections == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/metrics", "GET http://127.0.0.1:1/metrics: connection refused"),
        ("http://nobody.invalid:1", "GET http://nobody.invalid:1: "),
        ("http://[::1", "GET http://[::1: "),
        ("ftp://127.0.0.1", "GET ftp://127.0.0.1: "),
    ],
)
async def test_a_request_that_reaches_nobody_says_why(client: ControlClient, url: str, why: str) -> None:
    with pytest.raises(ControlError) as failure:
        await client.get(url, 5)
    assert str(failure.value).startswith(why)
    assert len(str(failure.value)) > len("GET http://nobody.invalid:1: ")


async def test_the_limit_of_time_is_that_of_the_whole_call(raw: RawReplica, client: ControlClient) -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    raw.serve = slow
    with pytest.raises(ControlError, match=r"TimeoutError"):
        await client.get(raw.url, 0.2)


async def test_an_answer_without_an_end_is_given_up(raw: RawReplica, client: ControlClient) -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 2**16)
                await writer.drain()
        except ConnectionError:
            gone.set()

    raw.serve = endless
    with pytest.raises(ControlError, match=r"GET http.*/metrics answered more than 2097152 bytes"):
        await client.get(raw.url + "/metrics", 60)
    await asyncio.wait_for(gone.wait(), 30)


async def test_compressed_answers_are_not_unpacked(raw: RawReplica, client: ControlClient) -> None:
    bomb = gzip.compress(b"{}" * 2**20)
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb
    assert await client.get(raw.url, 60) == (200, bomb)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"[" + b"{}," * 2**15 + b"1]", "answered JSON of more than 32768 objects and lists"),
        (200, b"hi", "answered something else than JSON"),
        (404, b"{}", "answered 404$"),
        (401, b"{}", "answered 401: it wants an API key, give it as KVGATE_REPLICA_API_KEY"),
    ],
)
async def test_what_is_no_usable_json_is_an_error(
    raw: RawReplica, client: ControlClient, method: str, status: int, body: bytes, why: str
) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(b"HTTP/1.1 %d S\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    raw.serve = once
    with pytest.raises(ControlError, match=f"{method} {raw.url} {why}"):
        await (client.get_json(raw.url, 60) if method == "GET" else client.post_json(raw.url, {}, 60))


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' options")
async def test_a_host_that_confirms_nothing_is_given_up_after_15_s(raw: RawReplica, client: ControlClient) -> None:
    await client.get(raw.url, 60)
    (connection,) = client._http._transport._pool.connections
    sock = connection._connection._network_stream.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
