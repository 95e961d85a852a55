"""The load: prepared requests on raw connections. Answers are parsed only to find their end.

In a closed loop, each connection sends its next request when the last one is answered. At a fixed rate, requests leave
on time whatever happened to earlier ones, each on a free connection. Requests that are due at the same time leave
together, because an event loop's timers are milliseconds apart.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast
from urllib.parse import urlsplit

import httptools


@dataclass
class Measured:
    """The results of one run. Times are in seconds."""

    done: int = 0
    failed: int = 0
    first_byte_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)


_numbers = count(1)


class Payload:
    """A request with a new body each time, also across payloads: `MARK` in it is replaced by a number of the same
    length."""

    MARK = b"0123456789"

    def __init__(self, path: str, body: bytes) -> None:
        head, self._behind = body.split(self.MARK)
        self._before = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + head
        )

    def next(self) -> bytes:
        return b"%b%010d%b" % (self._before, next(_numbers), self._behind)


class Connection(asyncio.Protocol):
    """One client connection, with one request at a time."""

    def __init__(self, measured: Measured, on_idle: Callable[[Connection], None], on_lost: Callable[[], None]) -> None:
        self._measured = measured
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._sent, self._first, self._is_busy = time.perf_counter(), 0.0, True
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, _body: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self._is_busy = False
        if self._parser.get_status_code() == 200:
            self._measured.done += 1
            self._measured.first_byte_s.append((self._first or now) - self._sent)
            self._measured.total_s.append(now - self._sent)
        else:
            self._measured.failed += 1
        self._on_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_busy:
            self._measured.failed += 1
            self._is_busy = False
            self._on_lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def _connect(urls: Sequence[str], count: int, make: Callable[[], Connection]) -> list[Connection]:
    loop = asyncio.get_running_loop()
    connections = []
    for index in range(count):
        where = urlsplit(urls[index % len(urls)])
        _, connection = await loop.create_connection(make, where.hostname or "", where.port or 0)
        connections.append(connection)
    return connections


async def closed_loop(urls: Sequence[str], payload: Payload, connections: int, seconds: float) -> Measured:
    """Sends as fast as possible, on this many connections spread over the URLs, for so long. A connection that the
    proxy drops is not replaced."""
    measured = Measured()
    busy = connections
    over = asyncio.Event()

    def idle(connection: Connection) -> None:
        if time.perf_counter() < deadline:
            connection.send(payload.next())
        else:
            ended()

    def ended() -> None:
        nonlocal busy
        busy -= 1
        if busy == 0:
            over.set()

    opened = await _connect(urls, connections, lambda: Connection(measured, idle, ended))
    started = time.perf_counter()
    deadline = started + seconds
    for connection in opened:
        connection.send(payload.next())
    try:
        async with asyncio.timeout(seconds + 30):
            await over.wait()
    except TimeoutError:
        measured.failed += busy
    for connection in opened:
        connection.close()
    return measured


async def fixed_rate(urls: Sequence[str], payload: Payload, per_s: float, seconds: float) -> Measured:
    """Sends evenly spaced requests on time. Opens more connections if all are busy."""
    measured = Measured()
    free: deque[Connection] = deque()
    sent, to_send = 0, int(per_s * seconds)
    over = asyncio.Event()

    def idle(connection: Connection) -> None:
        free.append(connection)
        ended()

    def ended() -> None:
        if measured.done + measured.failed == to_send:
            over.set()

    def make() -> Connection:
        return Connection(measured, idle, ended)

    opened = await _connect(urls, 64, make)
    free.extend(opened)
    started = time.perf_counter()
    while sent < to_send:
        due = min(to_send, int((time.perf_counter() - started) * per_s) + 1)
        for _ in range(due - sent):
            if not free:
                more = await _connect(urls, 16, make)
                free.extend(more)
                opened.extend(more)
            free.popleft().send(payload.next())
        sent = due
        await asyncio.sleep(max(0.0, started + sent / per_s - time.perf_counter()))
    try:
        async with asyncio.timeout(10):
            await over.wait()
    except TimeoutError:
        measured.failed = to_send - measured.done
    for connection in opened:
        connection.close()
    return measured
