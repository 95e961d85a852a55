"""A server that stops resets nobody who has connected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import uvicorn

from gateway.http import protocol
from gateway.server import Server, listen, protocols
from tests.gateway.http.conftest import Served
from tests.polling import eventually

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def listening() -> AsyncIterator[tuple[Server, socket.socket]]:
    """A gateway's server on a port of its own."""
    config = uvicorn.Config(
        cast("Any", None),
        http=protocols(Served().answer, lambda: 60.0),
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=20,
    )
    config.load()
    server = Server(config, cast("Any", None))
    server.lifespan = config.lifespan_class(config)
    sock = listen("127.0.0.1", 0, shared=False)
    await server.startup(sockets=[sock])
    yield server, sock
    for each in server.servers:
        each.close()


async def connected(server: Server, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client's connection that the server has accepted."""
    client = await asyncio.open_connection(*sock.getsockname())
    await eventually(lambda: server.server_state.connections)
    return client


async def test_who_waits_to_be_accepted_is_answered(listening: tuple[Server, socket.socket]) -> None:
    server, sock = listening
    with socket.socket() as client:
        client.connect(sock.getsockname())  # the loop does not run meanwhile, so nobody accepts it
        client.sendall(REQUEST)
        await server.shutdown([sock])
        client.settimeout(5)
        said = client.recv(65536)
    assert said.startswith(b"HTTP/1.1 200 ")


async def test_a_new_connection_may_still_bring_its_first_request(
    listening: tuple[Server, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_FIRST_REQUEST_S", 60.0)
    server, sock = listening
    reader, writer = await connected(server, sock)
    stopping = asyncio.get_running_loop().create_task(server.shutdown([sock]))
    await eventually(lambda: sock.fileno() == -1)
    writer.write(REQUEST)
    said = await asyncio.wait_for(reader.read(), 5)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in said
    writer.close()
    await asyncio.wait_for(stopping, 10)


async def test_a_new_connection_that_stays_silent_does_not_hold_up_the_stop(
    listening: tuple[Server, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_FIRST_REQUEST_S", 0.0)
    server, sock = listening
    reader, writer = await connected(server, sock)
    await asyncio.wait_for(server.shutdown([sock]), 10)
    assert await reader.read() == b""
    writer.close()
