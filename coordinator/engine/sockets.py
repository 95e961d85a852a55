"""Sockets and TLS of connections to replicas.

The socket options make the system notice a host that is gone without a word. A host that lost its power, or is behind a
cut network, closes no connection and refuses none.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from functools import cache

CONNECT_S = 2.0
"""The time to connect. A host answers within milliseconds; a lost packet is sent again after a second."""
KEEP_ALIVE_S = 4.0
"""An idle connection is kept for so long. vLLM closes it after 5 s, and a request on it would be reset."""
GONE_AFTER_S = 15
"""A host may leave data, or a probe of a quiet connection, unconfirmed for this time."""
_PROBE_AFTER_S = 5
_PROBE_EVERY_S = 2
_UNANSWERED_PROBES = (GONE_AFTER_S - _PROBE_AFTER_S) // _PROBE_EVERY_S

# TCP_USER_TIMEOUT limits how long sent data may stay unacknowledged (Linux waits 15 minutes otherwise), and how long a
# receiver may stay full. Keepalive probes a quiet connection, for example while an answer is awaited. Where both are
# set, Linux gives up probing after TCP_USER_TIMEOUT and ignores TCP_KEEPCNT; TCP_KEEPCNT is for other systems. A system
# without an option is left without it. Darwin calls TCP_KEEPIDLE TCP_KEEPALIVE.
_TCP_OPTIONS = (
    ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", _PROBE_AFTER_S),
    ("TCP_KEEPINTVL", _PROBE_EVERY_S),
    ("TCP_KEEPCNT", _UNANSWERED_PROBES),
    ("TCP_USER_TIMEOUT", GONE_AFTER_S * 1000),
)
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _TCP_OPTIONS if hasattr(socket, name)),
)


def notice_gone_host(sock: socket.socket) -> None:
    """Have the system end this TCP connection when the other host does not confirm anything for GONE_AFTER_S."""
    with suppress(OSError):  # the connection is lost already
        for level, option, value in SOCKET_OPTIONS:
            sock.setsockopt(level, option, value)


@cache
def tls_context() -> ssl.SSLContext:
    """Trusts the system's authorities and what SSL_CERT_FILE says (docs/how-to/tls.md). All callers share it: loading
    takes milliseconds."""
    return ssl.create_default_context()
