"""Cutting a connection so that nobody takes what came on it for complete."""

from __future__ import annotations

import asyncio
import socket
import struct

_NO_LINGERING = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """End a connection by a reset. HTTP/1.0 takes a connection's plain end for that of the answer."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    transport.abort()
