"""A TCP proxy in front of one server: a link that can be cut, cut one way, or slowed while it has open connections.

    passes         bytes pass at once
    slow           the bytes of a direction arrive later by a fixed time, in order, however many there are
    held           the bytes of a direction arrive only after the link is whole again: as in TCP, nothing is lost
    cut            open connections are reset, new ones are refused (if only some processes are struck: reset)

A fault affects all connections of a link, or only those of some processes. TCP's own probes end at the proxy: an end
that waits for held bytes sees a connection that is alive and silent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.faults.origin import pid_of_peer
from gateway.tasks import Tasks

_READ_BYTES = 65536
_IN_TRANSIT_PIECES = 256
_LINGER_ZERO = struct.pack("ii", 1, 0)


@dataclass
class Direction:
    """One direction of a link. `delay_s` applies to bytes that come from now on."""

    delay_s: float = 0.0
    is_whole: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.is_whole.set()

    def hold(self) -> None:
        self.is_whole.clear()


Writers = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Proxy:
    """After `start` it listens on its own port. A fault strikes the connections of the processes `pids`. None means all
    connections."""

    def __init__(self, host: str, port: int, pids: Callable[[], set[int]] | None = None) -> None:
        self._target = (host, port)
        self._pids = pids
        self._tasks = Tasks()
        self._server: asyncio.Server | None = None
        self.port = 0
        """Known once it is started."""
        self._is_refusing = False
        self._open: dict[Writers, bool] = {}
        """Each connection's two ends, and whether faults strike it."""
        self.requests, self.answers = Direction(), Direction()
        """From the client to the server, and back."""
        self._unharmed = Direction()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for ends in list(self._open):
            _abort(ends)
        await self._tasks.close()

    # -- faults ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        self._is_refusing = True
        if self._pids is None and self._server is not None:
            self._server.close()
            self._server = None
        for ends, is_struck in list(self._open.items()):
            if is_struck:
                _abort(ends)

    def slow(self, delay_s: float) -> None:
        """Delays each direction by half of this."""
        self.requests.delay_s = self.answers.delay_s = delay_s / 2

    async def mend(self) -> None:
        """Ends all faults. Bytes that were held arrive."""
        self._is_refusing = False
        if self._server is None:
            await self.start()
        self.slow(0.0)
        self.requests.is_whole.set()
        self.answers.is_whole.set()

    # -- connections -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_struck = self._pids is None or pid_of_peer(writer, self._pids()) is not None
        if self._is_refusing and is_struck:
            _abort((writer,))
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _abort((writer,))
            return
        ends = (writer, server_writer)
        self._open[ends] = is_struck
        requests, answers = (self.requests, self.answers) if is_struck else (self._unharmed, self._unharmed)
        ways = (
            self._tasks.spawn(self._carry(reader, server_writer, requests), "requests"),
            self._tasks.spawn(self._carry(server_reader, writer, answers), "answers"),
        )
        try:
            await asyncio.wait(ways)
        finally:
            self._open.pop(ends, None)
            for end in ends:
                end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        """Carries one direction until its sender is done or either end is gone. If one end is gone, resets the
        other."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_TRANSIT_PIECES)
        reading = self._tasks.spawn(_read(reader, pieces, way), "read")
        try:
            while True:
                due_s, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
                await way.is_whole.wait()
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
            if reader.exception() is None:
                writer.write_eof()
            else:
                _abort((writer,))
        except OSError:
            _abort((writer,))
        finally:
            reading.cancel()


async def _read(reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], way: Direction) -> None:
    """Reads pieces and notes the time at which each is to arrive. The last piece is empty."""
    piece = b"-"
    while piece:
        try:
            piece = await reader.read(_READ_BYTES)
        except OSError:
            piece = b""
        await pieces.put((asyncio.get_running_loop().time() + way.delay_s, piece))


def _abort(ends: Sequence[asyncio.StreamWriter]) -> None:
    """Resets these connections."""
    for end in ends:
        transport = end.transport
        sock = transport.get_extra_info("socket")
        if sock is not None and not transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        transport.abort()
