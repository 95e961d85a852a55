"""One connection to Redis, shared by every request of a gateway.

Calls made in the same turn of the event loop leave in one write and share one read. A caller that runs out of time
abandons its future: the reply is still read, and dropped, so nobody ever gets another caller's reply. A connection
whose oldest reply is overdue is discarded, and every call on it fails with StoreDown. Such a call may have run, or may
still run when Redis resumes: epochs protect against that (see pool.py). A connection is discarded as well if its server
has become a replica, or its slot has moved, which the first refused call tells.

redis-py opens the connection (URL, TLS, AUTH) and hands it over; hiredis packs and parses. No task has to wake up:
replies are handed out in the same call in which the socket delivered them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import hiredis
from redis.asyncio import Connection
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.driver_info import DriverInfo
from redis.exceptions import RedisError

from coordinator.errors import StoreDown, StoreError, StoreRefused
from coordinator.keys import PoolKeys
from coordinator.policy_knobs import PolicyKnobs
from coordinator.redis.time_limit import IN_ALL, TimeLimits, fail
from coordinator.scripts import LATER, NAMES, Script, load

Reply = Callable[[Any], None]
_DRIVER = DriverInfo()  # finding redis-py's version takes 2 ms: too long for each connection
Operands = tuple[Any, ...]
"""Of a script: numkeys, KEYS and ARGV, as `Script.operands` makes them."""


def has_result(future: asyncio.Future[Any]) -> bool:
    """Whether a future holds a result: it is not pending, was not cancelled, and holds no error."""
    return future.done() and not future.cancelled() and future.exception() is None


def check_server(url: str) -> None:
    """Raises StoreDown for a server's URL that cannot be used: an unknown option, a value of a wrong type."""
    _connection(url, 1.0)


def _connection(url: str, connect_s: float) -> AbstractConnection:
    try:
        options: dict[str, Any] = dict(parse_url(url))
        kind: type[AbstractConnection] = options.pop("connection_class", Connection)
        options |= {"protocol": 2, "socket_connect_timeout": connect_s, "driver_info": _DRIVER}
        options["redis_connect_func"] = _greet
        return kind(**options)
    except (RedisError, TypeError, ValueError) as error:
        raise StoreDown(
            f"no connection can be made of this URL: {error}; see its options after the question mark"
        ) from error


async def _greet(connection: AbstractConnection) -> None:
    """Authenticate. A connection that is refused is aborted: redis-py only closes it, and TLS then waits for Redis'
    goodbye, or 30 s, before the socket is gone."""
    transport = _transport(connection)
    try:
        await connection.on_connect()
    except BaseException:
        transport.abort()
        raise


def _transport(connection: AbstractConnection) -> asyncio.Transport:
    # redis-py has no public way to hand over a connection: its stream is in a private attribute.
    writer = connection._writer  # noqa: SLF001
    assert writer is not None
    return cast("asyncio.Transport", writer.transport)


class _NoScript(StoreRefused):
    """The server has forgotten the script."""


class _NotHere(StoreRefused):
    """This server does not serve such calls any more, or not now: it has become a replica, or the slot has moved."""


_NOT_HERE = ("READONLY", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED")


def _refusal(text: str) -> StoreRefused:
    code = text.partition(" ")[0]
    if code == "NOSCRIPT":
        return _NoScript(text)
    # Redis 6.2 wraps the error that a call inside a script got.
    return _NotHere(text) if code in _NOT_HERE or " -READONLY " in text else StoreRefused(text)


_INCOMPLETE = object()
_BEHIND_S = 0.002


class _Call:
    __slots__ = ("future", "on_reply", "operands", "script", "sent_at")

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.future: asyncio.Future[Any] | None = None
        """Set if somebody may await the call."""
        self.on_reply: Reply | None = None
        """Gets the reply if there is no future, or if the future is done already."""
        self.script: Script | None = None
        self.operands: Operands = ()


class Wire(asyncio.Protocol):
    """A pipelined connection. Not reusable: once closed or broken, open another."""

    allow_oom = True
    """Whether the server knows script flags (Redis >= 7), as `load_scripts` has found."""

    def __init__(self, connection: AbstractConnection, on_broken: Callable[[StoreError], None]) -> None:
        self._connection = connection
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Call] = deque()
        self._limits = TimeLimits()
        self._outbox: list[bytes] = []
        self._write_due_s = 0.0
        self.write_lag_s = 0.0
        """How long the urgent calls of the last write had waited for this process' event loop."""
        self._writes_soon = False
        self._write_later: asyncio.TimerHandle | None = None
        self._broken: StoreError | None = None
        self._replies = hiredis.Reader(replyError=_refusal, notEnoughData=_INCOMPLETE)
        self._transport = _transport(connection)
        self._transport.set_protocol(self)

    def __repr__(self) -> str:
        state = "broken" if self._broken else "open"
        return f"<Wire {state}, {len(self._pending)} awaiting replies, {len(self._outbox)} to send>"

    @classmethod
    async def open(cls, url: str, connect_s: float, on_broken: Callable[[StoreError], None]) -> Self:
        """Connect and authenticate within `connect_s` seconds, or raise StoreDown."""
        connection = _connection(url, connect_s)
        task = asyncio.current_task()
        assert task is not None
        cancellations = task.cancelling()
        try:
            async with asyncio.timeout(connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
            # While redis-py drains its socket, a cancellation is lost (asyncio.wait_for, Python < 3.12).
            if task.cancelling() > cancellations:
                raise asyncio.CancelledError
            return cls(connection, on_broken)
        # uvloop raises RuntimeError if the transport was closed meanwhile.
        except (RedisError, OSError, TimeoutError, RuntimeError) as error:
            await connection.disconnect(nowait=True)
            raise StoreDown(f"cannot connect to Redis: {str(error) or f'no answer within {connect_s:g} s'}") from error
        except asyncio.CancelledError:
            await connection.disconnect(nowait=True)
            raise

    # -- calls ---------------------------------------------------------------------------------------------------

    def send(self, *command: Any, budget_s: float | None = None, at_once: bool = False) -> asyncio.Future[Any]:
        """Send a command; the future holds its reply (bytes, never decoded) or a StoreError (StoreLate after
        `budget_s` of Redis' time: see TimeLimits). With `at_once` it is sent before this turn of the loop ends."""
        call = _Call(self._loop.time())
        future = call.future = self._loop.create_future()
        self._enqueue(call, command)
        if at_once:
            self.flush()
        self._limit(call, budget_s, None)
        return future

    def run(
        self,
        script: Script,
        operands: Operands,
        budget_s: float | None = None,
        on_abandoned: Reply | None = None,
        until_s: float | None = None,
    ) -> asyncio.Future[Any]:
        """Run a script. If the server has forgotten it, it is sent again with its text.

        After `budget_s` of Redis' time, or at `until_s`, the future fails with StoreLate (see TimeLimits). A reply that
        comes when the caller has given up (late, or cancelled) goes to `on_abandoned`, in the order of the connection;
        an exception where Redis refused the call.
        """
        call = _Call(self._loop.time())
        future = call.future = self._loop.create_future()
        call.on_reply = on_abandoned
        self._enqueue_script(call, script, operands)
        self._limit(call, budget_s, until_s)
        return future

    def script(self, name: str, knobs: PolicyKnobs | None = None) -> Script:
        """A script in the form that the server knows."""
        return load(name, self.allow_oom, knobs)

    def ask_script(self, name: str, keys: PoolKeys | None = None, /, **arguments: Any) -> asyncio.Future[Any]:
        """Run one of the scripts, with the arguments that its header declares."""
        script = self.script(name)
        return self.run(script, script.operands(keys, **arguments))

    def tell(
        self,
        script: Script,
        operands: Operands,
        on_reply: Reply | None = None,
        is_urgent: bool = False,
    ) -> None:
        """Run a script that nobody waits for; `on_reply` gets its reply, or the StoreError in its place. If it is not
        urgent, it leaves with the next urgent call, or after 2 ms."""
        call = _Call(self._loop.time())
        call.on_reply = on_reply
        self._enqueue_script(call, script, operands)
        self._schedule(is_urgent)

    def _schedule(self, is_urgent: bool) -> None:
        if is_urgent:
            if not self._writes_soon:
                self._writes_soon, self._write_due_s = True, self._loop.time()
                self._loop.call_soon(self.flush)
        elif self._write_later is None and not self._writes_soon:
            self._write_later = self._loop.call_later(_BEHIND_S, self.flush)

    def _enqueue_script(self, call: _Call, script: Script, operands: Operands) -> None:
        call.script, call.operands = script, operands
        self._enqueue(call, ("EVALSHA", script.sha, *operands))

    def _enqueue(self, call: _Call, command: tuple[Any, ...]) -> None:
        if self._broken is not None:
            _give(call, self._broken)
            return
        packed = hiredis.pack_command(command)  # first: it raises if an argument cannot be encoded
        self._pending.append(call)
        self._outbox.append(packed)
        if call.future is not None:
            self._schedule(True)

    def _limit(self, call: _Call, budget_s: float | None, until_s: float | None) -> None:
        if budget_s is not None and self._broken is None:
            assert call.future is not None
            until_s = call.sent_at + IN_ALL * budget_s if until_s is None else until_s
            self._limits.watch(call.future, budget_s, until_s, "Redis has not replied in time")

    def oldest_age_s(self) -> float:
        """How long the oldest unanswered call has waited; 0 if there is none."""
        return self._loop.time() - self._pending[0].sent_at if self._pending else 0.0

    # -- the socket ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes all calls that were made."""
        if self._writes_soon:
            self._writes_soon, self.write_lag_s = False, self._loop.time() - self._write_due_s
        if self._write_later is not None:
            self._write_later.cancel()
            self._write_later = None
        if self._outbox and self._broken is None and not self._transport.is_closing():
            batch, self._outbox = self._outbox, []
            self._transport.write(batch[0] if len(batch) == 1 else b"".join(batch))

    def data_received(self, data: bytes) -> None:
        replies = self._replies
        try:
            replies.feed(data)
            while (reply := replies.gets()) is not _INCOMPLETE:
                self._answer(self._pending.popleft(), reply)
        except hiredis.ProtocolError as error:
            self._break(StoreDown(f"connection to Redis lost: {error}"))
        except IndexError:
            self._break(StoreDown("Redis sent a reply that nobody asked for"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(StoreDown(f"connection to Redis lost: {exc or 'closed by the server'}"))

    def _answer(self, call: _Call, reply: Any) -> None:
        if isinstance(reply, StoreRefused):
            if isinstance(reply, _NoScript) and call.script is not None:
                script, call.script = call.script, None
                self._enqueue(call, ("EVAL", script.text, *call.operands))
                self._schedule(True)
                return
            # Only for scripts: plain commands may also look for keys of others, which may be anywhere in a cluster.
            if isinstance(reply, _NotHere) and call.operands:
                self._pending.appendleft(call)
                self._break(StoreDown(f"Redis does not serve this any more: {reply}"))
                return
        _give(call, reply)

    def _break(self, error: StoreError) -> None:
        if self._broken is not None:
            return
        self._broken = error
        self._outbox.clear()
        pending, self._pending = self._pending, deque()
        for call in pending:
            _give(call, error, is_broken=True)
        self._on_broken(error)

    async def close(self, reason: str = "closed") -> None:
        """Fail the pending calls and drop the connection without waiting for Redis."""
        self._break(StoreDown(reason))
        self._transport.abort()
        await self._connection.disconnect(nowait=True)


def _give(call: _Call, reply: Any, is_broken: bool = False) -> None:
    """Hand a reply, or the StoreError in its place, to its caller."""
    future = call.future
    if future is None or future.done():
        # If the connection broke, nobody knows whether an abandoned call ran: its on_reply is not called.
        if call.on_reply is not None and not (is_broken and future is not None):
            call.on_reply(reply)
    elif isinstance(reply, Exception):
        fail(future, reply)
    else:
        future.set_result(reply)


async def load_scripts(wire: Wire, knobs: Iterable[PolicyKnobs] = ()) -> None:
    """Load the scripts that the server lacks, and `place` with these settings: requests that come together must not
    find that it is missing."""
    missing = await _missing_scripts(wire, knobs)
    if "hold" in {one.name for one in missing}:
        try:
            await wire.send("SCRIPT", "LOAD", wire.script("hold").text)
        except StoreRefused:
            wire.allow_oom = False
            missing = await _missing_scripts(wire, knobs)
    # All at once: one after the other would take too long in a gateway whose event loop is busy.
    await asyncio.gather(*(wire.send("SCRIPT", "LOAD", script.text) for script in missing))


async def _missing_scripts(wire: Wire, knobs: Iterable[PolicyKnobs]) -> list[Script]:
    """The scripts that the server does not have. All of them if the user may not ask."""
    scripts = [wire.script(name) for name in NAMES if name not in LATER]
    scripts += [wire.script("place", each) for each in knobs]
    try:
        found = await wire.send("SCRIPT", "EXISTS", *(script.sha for script in scripts))
    except StoreRefused:
        return scripts
    return [script for script, exists in zip(scripts, found, strict=True) if not exists]
