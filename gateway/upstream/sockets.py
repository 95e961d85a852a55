"""Socket options that detect a replica's host that is gone without closing its connections: it lost power, or the
network is cut."""

from __future__ import annotations

import socket
from contextlib import suppress

GONE_AFTER_S = 15
"""How long a host may leave sent data, or probes of a quiet connection, unacknowledged."""
_PROBE_AFTER_S = 5
_PROBE_EVERY_S = 2
_UNANSWERED_PROBES = (GONE_AFTER_S - _PROBE_AFTER_S) // _PROBE_EVERY_S

# TCP_USER_TIMEOUT limits how long data may be unacknowledged (otherwise 15 minutes on Linux), or a receiver's buffer
# may be full. Keepalive probes a connection on which nothing is sent, for example while an answer is awaited. If both
# are set, Linux stops probing after TCP_USER_TIMEOUT and ignores TCP_KEEPCNT, which is for other systems. Options that
# a system does not have are left out; Darwin's name of TCP_KEEPIDLE is TCP_KEEPALIVE.
_TCP_OPTIONS = (
    ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", _PROBE_AFTER_S),
    ("TCP_KEEPINTVL", _PROBE_EVERY_S),
    ("TCP_KEEPCNT", _UNANSWERED_PROBES),
    ("TCP_USER_TIMEOUT", GONE_AFTER_S * 1000),
)
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _TCP_OPTIONS if hasattr(socket, name)),
)


def notice_gone_host(sock: socket.socket) -> None:
    """Let the system end this TCP connection when the other host acknowledges nothing for GONE_AFTER_S."""
    with suppress(OSError):  # the connection may be lost already
        for level, option, value in _OPTIONS:
            sock.setsockopt(level, option, value)


def new_socket(address: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    """A TCP socket for one of getaddrinfo's addresses."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    notice_gone_host(sock)
    return sock
