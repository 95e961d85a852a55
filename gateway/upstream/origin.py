"""Connections to replicas, kept for the next request.

A connection is reused for less time than vLLM keeps it open, or than its server says, so that few requests are
sent on a connection that is being closed. The connection used last is used next, so that connections beyond the current
load become old and close.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import SplitResult, quote, urlsplit

from coordinator.engine.sockets import CONNECT_S, KEEP_ALIVE_S
from gateway.upstream.connection import Connection
from gateway.upstream.errors import UpstreamError

_SAFE_IN_PATH = "/%:@!$&'()*+,;="
"""The characters that a path may have unquoted (RFC 3986), and the percent sign of quoted ones."""


Tls = Callable[[], ssl.SSLContext]


def path_prefix(parts: SplitResult) -> str:
    """What stands before each path at a replica with this URL."""
    return quote(parts.path.rstrip("/"), safe=_SAFE_IN_PATH)


class Origin:
    """The connections to one replica's address. Raises UpstreamError if the URL is not a usable address."""

    def __init__(self, url: str, tls: Tls) -> None:
        try:  # the URL may come from a record in Redis, which anybody may have written
            parts = urlsplit(url)
            port = parts.port
            self.host_header = parts.netloc.rpartition("@")[2].encode("idna").decode()
        except ValueError as error:
            raise UpstreamError("refused", f"cannot use the address {url!r} ({error})") from error
        self._tls = tls if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", port or (443 if self._tls else 80)
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._is_retired = False
        self.path_prefix = path_prefix(parts)

    async def acquire(self) -> Connection:
        """An open connection without a running request. Raises UpstreamError."""
        now_s = time.monotonic()
        while self._idle and not (self._idle[0].is_open and self._idle[0].kept_until_s >= now_s):
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.kept_until_s >= now_s:
                return connection
            connection.abort()
        return await self._connect()

    async def replace_idle(self) -> Connection:
        """A new connection in the place of the oldest idle one. Raises UpstreamError."""
        if self._idle:
            self._idle.popleft().abort()
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._rested, self._open.discard),
                    self._host,
                    self._port,
                    ssl=self._tls and self._tls(),
                )
        except TimeoutError:
            raise UpstreamError("refused", f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            why = f"cannot connect to {self._host}:{self._port} ({_cause(error)})"
            raise UpstreamError("refused", why) from error
        self._open.add(connection)
        return connection

    def _rested(self, connection: Connection) -> None:
        if self._is_retired:
            connection.abort()
        else:
            connection.kept_until_s = connection.ended_s + min(KEEP_ALIVE_S, connection.server_keeps_s)
            self._idle.append(connection)

    def retire(self) -> None:
        """Keep no connection: idle ones are closed now, others when their answer is complete."""
        self._is_retired = True
        while self._idle:
            self._idle.pop().abort()

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()


def _cause(error: OSError) -> str:
    """The system's own words. Those of asyncio name the failed call, and other addresses of the host."""
    number = 0 if isinstance(error, ssl.SSLError) else error.errno or 0
    return (os.strerror(number) if number > 0 else error.strerror or str(error) or type(error).__name__).lower()
