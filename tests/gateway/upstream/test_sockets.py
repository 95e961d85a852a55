"""The sockets to a host notice that the host is gone, although no connection is closed."""

from __future__ import annotations

import socket
import sys

import pytest

from gateway.upstream import Upstream
from tests.gateway.upstream.conftest import RawReplica


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' options")
async def test_a_host_that_confirms_nothing_is_given_up_after_15_s(raw: RawReplica, upstream: Upstream) -> None:
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nh"  # its end is missing, so the connection is in use
    await upstream.send("GET", raw.url, "/", {})
    (connection,) = upstream._origins[raw.url]._open
    sock, tcp = connection._transport.get_extra_info("socket"), socket.IPPROTO_TCP
    assert sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 15_000
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    first_s, every_s = sock.getsockopt(tcp, socket.TCP_KEEPIDLE), sock.getsockopt(tcp, socket.TCP_KEEPINTVL)
    assert (first_s + every_s * sock.getsockopt(tcp, socket.TCP_KEEPCNT), every_s <= 5) == (15, True)
