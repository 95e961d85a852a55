"""Options of sockets to replicas, by which a host that is gone without a word is noticed: one without power, or behind
a cut network, closes nothing and refuses nothing."""

from __future__ import annotations

import socket
from contextlib import suppress

GONE_AFTER_S = 15
"""So long may a host leave what was sent to it unconfirmed, be it data or a probe of a quiet connection."""
_PROBE_AFTER_S = 5
_PROBE_EVERY_S = 2
_UNANSWERED_PROBES = (GONE_AFTER_S - _PROBE_AFTER_S) // _PROBE_EVERY_S

# TCP_USER_TIMEOUT limits how long data may be unacknowledged, for which Linux waits 15 minutes otherwise, or a full
# receiver may stay full. Keepalive probes a connection on which nothing is sent, as while an answer is awaited. Where
# both are set, Linux gives up probing by TCP_USER_TIMEOUT, and does not look at TCP_KEEPCNT: that is for other systems.
# A system lacks what it does not know; Darwin calls TCP_KEEPIDLE TCP_KEEPALIVE.
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
    """Have the system end this TCP connection when the other host does not confirm anything for GONE_AFTER_S."""
    with suppress(OSError):  # of one that is lost already
        for level, option, value in _OPTIONS:
            sock.setsockopt(level, option, value)


def new_socket(address: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    """A TCP socket for one of getaddrinfo's addresses."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    notice_gone_host(sock)
    return sock
