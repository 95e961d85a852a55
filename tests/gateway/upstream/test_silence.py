"""The time limit for silence between two pieces of a replica's answer, measured with a clock that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway import deadlines
from gateway.upstream import Upstream, UpstreamError, answer
from tests.gateway.upstream.conftest import RawReplica
from tests.polling import eventually

IDLE_S = 10.0


class Clock:
    """A clock that the test moves. It counts how often it is read."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return self.now_s

    async def goes_on(self, by_s: float) -> None:
        """Moves the time, and waits until the code under test has read it."""
        self.now_s += by_s
        before = self._looks
        await eventually(lambda: self._looks > before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(answer, "time", clock)
    monkeypatch.setattr(deadlines, "time", clock)
    return clock


class Relayed:
    """An answer that is being relayed. The test sends the replica's pieces."""

    def __init__(self, raw: RawReplica, clock: Clock) -> None:
        self.got = b""
        self.has_room = True
        self._clock = clock
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.aborted = asyncio.Event()
        self._raw = raw
        raw.serve = self._serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        gone = asyncio.ensure_future(reader.read())
        gone.add_done_callback(lambda _: self.aborted.set())
        while piece := await self._pieces.get():
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await gone

    def says(self, piece: bytes) -> None:
        """Sends a piece. An empty piece ends the answer."""
        self._pieces.put_nowait(piece)

    async def hears(self, piece: bytes) -> None:
        self.says(piece)
        await eventually(lambda: self.got.endswith(piece))

    async def relay(self, upstream: Upstream) -> None:
        asked = await upstream.send("GET", self._raw.url, "/", {})
        try:
            last = await asked.relay(self._sink, self._drained)
            self.got += last
        finally:
            asked.close()

    def _sink(self, piece: bytes) -> bool:
        self.got += piece
        return self.has_room

    async def _drained(self) -> None:
        """A client that needs ten times as long as a replica may be silent."""
        await self._clock.goes_on(10 * IDLE_S)
        self.has_room = True


@pytest.fixture
def relayed(raw: RawReplica, clock: Clock) -> Relayed:
    return Relayed(raw, clock)


@pytest.fixture
async def relaying(relayed: Relayed) -> AsyncIterator[asyncio.Future[None]]:
    upstream = Upstream(IDLE_S, None)
    yield asyncio.ensure_future(relayed.relay(upstream))
    await upstream.close()


async def test_every_piece_gives_a_replica_its_time_anew(
    relayed: Relayed, relaying: asyncio.Future[None], clock: Clock
) -> None:
    await relayed.hears(b"0")
    for piece in (b"1", b"2", b"3"):
        await clock.goes_on(0.9 * IDLE_S)
        await relayed.hears(piece)
    relayed.says(b"")
    await relaying
    assert relayed.got == b"0123"


async def test_a_silence_that_is_longer_ends_the_answer_and_its_connection(
    relayed: Relayed, relaying: asyncio.Future[None], clock: Clock
) -> None:
    await relayed.hears(b"0")
    await clock.goes_on(1.1 * IDLE_S)
    with pytest.raises(UpstreamError, match="idle: silent for 10 s"):
        await relaying
    await asyncio.wait_for(relayed.aborted.wait(), 30)


async def test_time_in_which_the_client_is_waited_for_does_not_count(
    relayed: Relayed, relaying: asyncio.Future[None], clock: Clock
) -> None:
    relayed.has_room = False
    await relayed.hears(b"0")
    await eventually(lambda: relayed.has_room)
    await clock.goes_on(0.9 * IDLE_S)
    await relayed.hears(b"1")
    await clock.goes_on(1.1 * IDLE_S)
    with pytest.raises(UpstreamError, match="idle"):
        await relaying
