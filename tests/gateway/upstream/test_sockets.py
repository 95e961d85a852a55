"""A host that is gone without a word is noticed by the sockets to it."""

from __future__ import annotations

import asyncio.trsock
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from gateway.upstream import Upstream
from tests.gateway.upstream.conftest import RawReplica

Sockets = AsyncIterator[asyncio.trsock.TransportSocket]


@asynccontextmanager
async def of_a_clients_request(raw: RawReplica, upstream: Upstream) -> Sockets:
    await upstream.send("GET", raw.url, "/", {})
    (connection,) = upstream._origins[raw.url]._open
    yield connection._transport.get_extra_info("socket")


@asynccontextmanager
async def of_a_gateways_own_question(raw: RawReplica, upstream: Upstream) -> Sockets:
    async with upstream._session.get(raw.url) as response:
        assert response.connection is not None
        assert response.connection.transport is not None
        yield response.connection.transport.get_extra_info("socket")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' options")
@pytest.mark.parametrize("connected", [of_a_clients_request, of_a_gateways_own_question])
async def test_a_host_that_confirms_nothing_is_given_up_after_15_s(
    raw: RawReplica,
    upstream: Upstream,
    connected: Callable[[RawReplica, Upstream], AbstractAsyncContextManager[asyncio.trsock.TransportSocket]],
) -> None:
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nh"  # its end is to come: the connection is in use
    async with connected(raw, upstream) as sock:
        tcp = socket.IPPROTO_TCP
        assert sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 15_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        first_s, every_s = sock.getsockopt(tcp, socket.TCP_KEEPIDLE), sock.getsockopt(tcp, socket.TCP_KEEPINTVL)
        assert (first_s + every_s * sock.getsockopt(tcp, socket.TCP_KEEPCNT), every_s <= 5) == (15, True)
