"""One connection to Redis, shared by every request of a gateway.

Calls made in the same turn of the event loop leave in one write and share one read. A caller that runs out of
time abandons its future: the reply is still read and dropped, so that nobody ever gets another caller's reply.
A connection whose oldest reply is overdue is discarded, and every call on it fails as StoreDown: such a call may
have run, or may still run when Redis resumes, which is what epochs are for (see pool.py).

redis-py opens the connection (URL, TLS, AUTH) and speaks the protocol; this file decides who waits for what.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Connection
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.exceptions import NoScriptError, RedisError, ResponseError

from coordinator.errors import StoreDown, StoreError, StoreLate, StoreRefused
from coordinator.scripts import Script


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Marks a failure as seen: most calls are written behind and nobody awaits them."""
    if not future.cancelled():
        future.exception()


def check_url(url: str) -> None:
    """Raises StoreDown for a URL that no connection can be made of: an unknown option, a wrong type."""
    _connection(url, 1.0)


def _connection(url: str, connect_s: float) -> AbstractConnection:
    try:
        options: dict[str, Any] = dict(parse_url(url))
        kind: type[AbstractConnection] = options.pop("connection_class", Connection)
        options |= {"protocol": 2, "socket_connect_timeout": connect_s}
        # Overdue replies are watched for by the store; redis-py's own timeout would cost a task for each write.
        return kind(**{"socket_timeout": None, **options})
    except (RedisError, TypeError, ValueError) as error:
        raise StoreDown(f"no connection can be made of this URL: {error}") from error


class _Call:
    __slots__ = ("future", "on_abandoned", "retry", "sent_at", "timer")

    def __init__(self, future: asyncio.Future[Any], sent_at: float, retry: tuple[Any, ...] | None) -> None:
        self.future = future
        self.sent_at = sent_at
        self.retry = retry
        self.timer: asyncio.TimerHandle | None = None
        self.on_abandoned: Callable[[Any], None] | None = None


class Wire:
    """A pipelined connection. Not reusable: once closed or broken, open another."""

    def __init__(self, connection: AbstractConnection, on_broken: Callable[[StoreError], None]) -> None:
        self._connection = connection
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Call] = deque()
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._broken: StoreError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        state = "broken" if self._broken else "open"
        return f"<Wire {state}, {len(self._pending)} awaiting replies, {len(self._outbox)} to send>"

    @classmethod
    async def open(cls, url: str, connect_s: float, on_broken: Callable[[StoreError], None]) -> Wire:
        """Connect and authenticate within `connect_s` seconds, or raise StoreDown."""
        connection = _connection(url, connect_s)
        try:
            async with asyncio.timeout(connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            raise StoreDown(f"cannot connect to Redis: {str(error) or f'no answer within {connect_s:g} s'}") from error
        except asyncio.CancelledError:
            await connection.disconnect(nowait=True)
            raise
        wire = cls(connection, on_broken)
        wire._tasks = [wire._loop.create_task(wire._write()), wire._loop.create_task(wire._read())]
        return wire

    def send(self, *command: Any) -> asyncio.Future[Any]:
        """Send a command; the future holds its reply (bytes, never decoded) or a StoreError."""
        call = self._call(None)
        self._enqueue(call, command)
        return call.future

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Any],
        budget_s: float | None = None,
        on_abandoned: Callable[[Any], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Run a script; where the server has forgotten it, it is sent again with its text.

        After `budget_s` the future fails with StoreLate. A reply that comes when the caller has given up (late, or
        cancelled) goes to `on_abandoned`, in the order of the connection; an exception where Redis refused the call.
        """
        tail = (len(keys), *keys, *args)
        call = self._call(("EVAL", script.text, *tail))
        call.on_abandoned = on_abandoned
        self._enqueue(call, ("EVALSHA", script.sha, *tail))
        if budget_s is not None and not call.future.done():
            call.timer = self._loop.call_later(budget_s, self._late, call, budget_s, True)
        return call.future

    def _call(self, retry: tuple[Any, ...] | None) -> _Call:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(_retrieve)
        if self._broken is not None:
            future.set_exception(self._broken)
        return _Call(future, self._loop.time(), retry)

    def _enqueue(self, call: _Call, command: tuple[Any, ...]) -> None:
        if self._broken is not None:
            return
        packed = self._connection.pack_command(*command)  # first: it raises where an argument has no encoding
        self._pending.append(call)
        self._outbox.extend(packed)
        self._wake.set()

    def _late(self, call: _Call, budget_s: float, first_time: bool) -> None:
        """The budget is Redis', not ours: if the loop itself ran late, replies may be waiting to be read."""
        if call.future.done():
            return
        overrun = self._loop.time() - call.sent_at - budget_s
        if first_time and overrun > 0.002:
            call.timer = self._loop.call_later(min(overrun, budget_s), self._late, call, budget_s, False)
            return
        call.future.set_exception(StoreLate(f"no reply from Redis within {budget_s * 1000:.0f} ms"))

    def oldest_age_s(self) -> float:
        """How long the oldest unanswered call has waited; 0 when none does."""
        return self._loop.time() - self._pending[0].sent_at if self._pending else 0.0

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                if self._broken is not None:  # not left to cancellation: redis-py's wait_for may swallow one
                    return
                self._wake.clear()
                batch, self._outbox = self._outbox, []
                await self._connection.send_packed_command([b"".join(batch)], check_health=False)
        except (RedisError, OSError) as error:
            self._break(StoreDown(f"connection to Redis lost: {error}"))

    async def _read(self) -> None:
        try:
            while True:
                try:
                    reply = await self._connection.read_response(
                        disable_decoding=True, timeout=math.inf, disconnect_on_error=False
                    )
                except ResponseError as error:
                    reply = error
                self._answer(self._pending.popleft(), reply)
        except (RedisError, OSError) as error:
            self._break(StoreDown(f"connection to Redis lost: {error}"))
        except IndexError:
            self._break(StoreDown("Redis sent a reply that nobody asked for"))

    def _answer(self, call: _Call, reply: Any) -> None:
        if isinstance(reply, NoScriptError) and call.retry is not None:
            command, call.retry = call.retry, None
            self._enqueue(call, command)
            return
        if call.timer is not None:
            call.timer.cancel()
        if call.future.done():
            if call.on_abandoned is not None:
                call.on_abandoned(reply)
            return
        if isinstance(reply, ResponseError):
            call.future.set_exception(StoreRefused(str(reply)))
        else:
            call.future.set_result(reply)

    def _break(self, error: StoreError) -> None:
        if self._broken is not None:
            return
        self._broken = error
        self._wake.set()
        for call in self._pending:
            if call.timer is not None:
                call.timer.cancel()
            if not call.future.done():
                call.future.set_exception(error)
        self._pending.clear()
        self._on_broken(error)

    async def close(self, reason: str = "closed") -> None:
        """Fail what is pending and drop the connection without waiting for Redis."""
        self._break(StoreDown(reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.disconnect(nowait=True)
