"""A replica's answer as it arrives."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.deadlines import Deadlines
from gateway.http.pieces import joined
from gateway.upstream.errors import UpstreamError

Sink = Callable[[bytes], bool]
"""Takes a piece of a body; False where no more can be taken for now."""
HasRoom = Callable[[int], bool]
"""Whether so many bytes may be held."""

_READ_AHEAD_BYTES = 2**18


class AnswerSource(Protocol):
    """The connection that an answer comes on."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


class Answer:
    """One answer. Its connection puts in what comes, whoever asked takes it out: gathered, or into a sink.

    Into a sink, bytes go in the call in which the socket gave them, without a task that wakes up in between: of a
    stream of tokens nearly all of the cost is per piece.
    """

    __slots__ = (
        "_deadlines",
        "_error",
        "_held",
        "_idle_s",
        "_is_paused",
        "_loop",
        "_sink",
        "_source",
        "_waiter",
        "due_s",
        "has_head",
        "headers",
        "is_complete",
        "status",
    )

    def __init__(
        self, source: AnswerSource, loop: asyncio.AbstractEventLoop, deadlines: Deadlines, idle_s: float
    ) -> None:
        self.due_s = math.inf
        """When it has been silent for `idle_s` (monotonic time). Moved by every piece: that costs less than a timer."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.has_head = False
        self.is_complete = False
        self._source = source
        self._loop = loop
        self._deadlines = deadlines
        self._idle_s = idle_s
        self._held: bytes | bytearray = b""
        self._is_paused = False
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None

    @property
    def is_event_stream(self) -> bool:
        return any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers)

    @property
    def content_length(self) -> int | None:
        """The body's length where its head tells it."""
        return next((int(value) for name, value in self.headers if name == b"content-length"), None)

    # -- out -----------------------------------------------------------------------------------------------------

    async def head(self) -> None:
        """Until status and headers are here. Raises UpstreamError."""
        while not self.has_head:
            await self._news()

    async def gathered(self, limit_bytes: int, has_room: HasRoom) -> bool:
        """Gather the body: until it is complete (True), or until more than `limit_bytes` of it are held, or there is
        no room for them (False). Raises UpstreamError when the replica breaks off."""
        while not self.is_complete:
            size = len(self._held)
            if size > limit_bytes or not has_room(size):
                return False
            self._resume()
            await self._news()
        return True

    def look(self) -> bytes:
        """What has been gathered and not been taken."""
        return bytes(self._held)

    def take(self) -> bytes:
        """The same; it is not held here any more."""
        held, self._held = bytes(self._held), b""
        self._resume()
        return held

    async def relay(self, sink: Sink, drained: Callable[[], Awaitable[None]]) -> bytes:
        """Give each piece to `sink` as it comes; where it takes no more, wait for `drained()`. Returns the last piece,
        if it came together with the end: then both can go on in one. Raises UpstreamError, also where the replica is
        silent for `idle_s` while it is read from."""
        self._sink = sink
        self._heard()
        self._deadlines.add(self)
        try:
            if self._held and not self.is_complete:
                self._give(self.take())
            while not self.is_complete:
                if self._is_paused:
                    await drained()
                    self._resume()
                else:
                    await self._news()
            return self.take()
        finally:
            self._deadlines.remove(self)
            self._sink = None

    def close(self) -> None:
        """Let go of it. One that is not complete takes its connection with it: vLLM then aborts the request."""
        if not self.is_complete:
            self._source.abort()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._heard()  # nothing could be, meanwhile
            if not self.is_complete:
                self._source.resume()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    # -- in ------------------------------------------------------------------------------------------------------

    def put(self, piece: bytes, *, is_last: bool) -> None:
        """What one read of the socket brought; `is_last`: the end comes with it."""
        if self._sink is not None and not is_last:
            self._heard()
            self._give(piece)
            return
        self._held = joined(self._held, piece)
        if len(self._held) > _READ_AHEAD_BYTES:
            self._pause()
        self.wake()

    def end(self) -> None:
        self.is_complete = True
        self.wake()

    def fail(self, error: UpstreamError) -> None:
        if not self.is_complete:
            self._error = error
            self.wake()

    def expire(self) -> None:
        """Nothing was heard for `idle_s`. While its reader has it paused, that is not the replica's fault."""
        if not self._is_paused:
            self.fail(UpstreamError("idle", f"silent for {self._idle_s:g} s"))

    def _heard(self) -> None:
        self.due_s = time.monotonic() + self._idle_s

    def wake(self) -> None:
        """Somebody may wait for the head, a piece or the end."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give(self, piece: bytes) -> None:
        assert self._sink is not None
        if not self._sink(piece):
            self._pause()
            self.wake()

    def _pause(self) -> None:
        if not self._is_paused and not self.is_complete:
            self._is_paused = True
            self._source.pause()
