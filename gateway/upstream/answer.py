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
"""Takes a piece of a body. Returns False if it can take no more for now."""
HasRoom = Callable[[int], bool]
"""Whether there is room for this number of bytes."""

_READ_AHEAD_BYTES = 2**18


class AnswerSource(Protocol):
    """The connection of an answer."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


class Answer:
    """One answer. Its connection puts bytes in; the caller takes them out, gathered or through a sink.

    A sink gets bytes in the same call in which the socket delivers them. No task has to wake up in between: nearly the
    whole cost of a stream of tokens is per piece.
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
        "head_bytes",
        "headers",
        "is_complete",
        "status",
    )

    def __init__(
        self, source: AnswerSource, loop: asyncio.AbstractEventLoop, deadlines: Deadlines, idle_s: float
    ) -> None:
        self.due_s = math.inf
        """When `idle_s` of silence are over (monotonic time). Each piece moves it, which is cheaper than a timer."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.has_head = False
        self.head_bytes = 0
        """The size of an unusually large head; 0 for others."""
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
        return self._content_type.startswith(b"text/event-stream")

    @property
    def comes_in_pieces(self) -> bool:
        """Whether a client can use its pieces as they come, as those of speech. JSON is of use as a whole only."""
        return self.status < 400 and self.content_length is None and not self.is_json

    @property
    def is_json(self) -> bool:
        media_type = self._content_type.partition(b";")[0].strip()
        return media_type == b"application/json" or media_type.endswith(b"+json")

    @property
    def _content_type(self) -> bytes:
        for name, value in self.headers:
            if name == b"content-type":
                return value.lower()
        return b""

    @property
    def content_length(self) -> int | None:
        """The body's length; None if the head does not have it."""
        return next((int(value) for name, value in self.headers if name == b"content-length"), None)

    # -- taken out by the caller ---------------------------------------------------------------------------------

    async def head(self) -> None:
        """Wait for the status and headers. Raises UpstreamError."""
        while not self.has_head:
            await self._news()

    async def gathered(self, limit_bytes: int, has_room: HasRoom) -> bool:
        """Gather the body until it is complete (True), or until it exceeds `limit_bytes` or the room (False). A large
        head takes room, too.

        Raises UpstreamError if the replica breaks off.
        """
        while not self.is_complete:
            size = len(self._held)
            if size > limit_bytes or not has_room(size + self.head_bytes):
                return False
            self._resume()
            await self._news()
        return True

    def look(self) -> bytes:
        """The gathered bytes, which stay here."""
        return bytes(self._held)

    def take(self) -> bytes:
        """The gathered bytes, which leave the answer."""
        held, self._held = bytes(self._held), b""
        self._resume()
        return held

    async def relay(self, sink: Sink, drained: Callable[[], Awaitable[None]]) -> bytes:
        """Give each piece to `sink` as it comes, and wait for `drained()` when the sink takes no more.

        Returns the last piece if it came together with the end, so that the caller can send both at once. Raises
        UpstreamError, also if the replica is silent for `idle_s` while it is being read.
        """
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
        """Give up the answer. If it is not complete, its connection is aborted; vLLM then aborts the request."""
        if not self.is_complete:
            self._source.abort()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._heard()  # the socket was not read meanwhile
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

    # -- put in by the connection --------------------------------------------------------------------------------

    def put(self, piece: bytes, *, is_last: bool) -> None:
        """The bytes of one read of the socket. `is_last`: the end of the body came with them."""
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
        """Nothing came for `idle_s`. While the reader has paused the answer, that is not the replica's fault."""
        if not self._is_paused:
            self.fail(UpstreamError("idle", f"silent for {self._idle_s:g} s"))

    def _heard(self) -> None:
        self.due_s = time.monotonic() + self._idle_s

    def wake(self) -> None:
        """Wake the task that waits for the head, a piece or the end."""
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
