"""Processes that read bodies which would hold the event loop for too long.

JSON's parser keeps Python's lock, so a thread would not help. A process is started when it is needed, and ended when
nobody has needed it for a while. One that has read a very large body is replaced, since an allocator rarely gives its
memory back; so is one whose client hung up meanwhile, and one that takes too long.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import structlog

from gateway.errors import ApiError
from gateway.request.fairness import FairTurns
from gateway.request.reading.document import Body, BodyHead, BodyRules, ParsedBody, ResolveScope
from gateway.request.reading.worker_process import (
    FAILURE,
    MESSAGE_HEADER,
    REFUSAL,
    RESULT,
    SCOPE,
    SCOPE_REQUEST,
    TASK,
    Task,
    encode_message,
)

_log = structlog.get_logger("kvgate.reading")

WORKERS = 2
LIMIT_S = 30.0
IDLE_S = 5.0
"""A process has 25 MB; starting one takes 0.1 s."""
_LARGE_BYTES = 8 * 2**20
_PIECE_BYTES = 2**18


@dataclass(eq=False, slots=True)
class _Worker:
    """A process, and the connection to its input and output."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Workers:
    """Reads bodies in processes of its own, `WORKERS` at a time, fairly between clients. `close` it at the end."""

    def __init__(self, rules: BodyRules) -> None:
        self._rules = rules
        self.turns = FairTurns(WORKERS)
        """Wait here for a turn before `read`."""
        self._idle: dict[_Worker, asyncio.TimerHandle] = {}
        """Those that nobody needs, and when each ends."""
        self._running: set[_Worker] = set()
        self._ending: set[asyncio.Future[int]] = set()

    async def read(self, head: BodyHead, body: Body, resolve_scope: ResolveScope) -> ParsedBody:
        """As `read_body`, in another process. Raises ApiError."""
        worker = self._take_idle() or await self._start()
        is_reusable = False
        try:
            async with asyncio.timeout(LIMIT_S):
                parsed = await self._converse(worker, head, body, resolve_scope)
            is_reusable = len(body) < _LARGE_BYTES
        except ApiError:
            is_reusable = len(body) < _LARGE_BYTES
            raise
        except TimeoutError:
            _log.error("reading a body took too long", limit_s=LIMIT_S, body_bytes=len(body), path=head.path)
            raise _failed() from None
        except (asyncio.IncompleteReadError, OSError):
            _log.error("the process that read a body has ended", body_bytes=len(body), path=head.path)
            raise _failed() from None
        finally:
            if is_reusable:
                self._idle[worker] = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle, worker)
            else:
                self._end(worker)
        return parsed

    def _end_idle(self, worker: _Worker) -> None:
        del self._idle[worker]
        self._end(worker)

    def _take_idle(self) -> _Worker | None:
        while self._idle:
            worker, ends = self._idle.popitem()
            ends.cancel()
            if worker.process.poll() is None:
                return worker
            self._end(worker)
        return None

    async def _start(self) -> _Worker:
        process, connection = _spawn()
        try:
            worker = _Worker(process, *await asyncio.open_connection(sock=connection, limit=_PIECE_BYTES))
        except BaseException:
            connection.close()
            self._reap(process)
            raise
        self._running.add(worker)
        return worker

    async def _converse(self, worker: _Worker, head: BodyHead, body: Body, resolve_scope: ResolveScope) -> ParsedBody:
        await _send(worker.writer, *encode_message(TASK, Task(head, self._rules), body))
        while True:
            kind, content, changed = await _receive(worker.reader)
            if kind == SCOPE_REQUEST:
                try:
                    scope = resolve_scope(*msgspec.msgpack.decode(content))
                except ApiError:
                    await _send(worker.writer, *encode_message(SCOPE, None))
                    raise
                await _send(worker.writer, *encode_message(SCOPE, scope))
            elif kind == RESULT:
                parsed = msgspec.msgpack.decode(content, type=ParsedBody)
                parsed.body = changed or None
                return parsed
            elif kind == REFUSAL:
                raise ApiError(*msgspec.msgpack.decode(content))
            else:
                assert kind == FAILURE
                _log.error("reading a body failed", error=msgspec.msgpack.decode(content), path=head.path)
                raise _failed()

    def _end(self, worker: _Worker) -> None:
        self._running.discard(worker)
        worker.writer.close()
        self._reap(worker.process)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        ended = asyncio.get_running_loop().run_in_executor(None, process.wait)
        self._ending.add(ended)
        ended.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End the processes."""
        for ends in self._idle.values():
            ends.cancel()
        for worker in list(self._running):
            self._end(worker)
        await asyncio.gather(*self._ending)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, and our end of its input and output. Not by the event loop: uvloop forks, which takes 40 ms where much
    memory is in use; this takes 2 ms."""
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: what lies in the working directory is not imported.
        command = [sys.executable, "-P", "-m", "gateway.request.reading.worker_process"]
        return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno()), ours


async def _send(writer: asyncio.StreamWriter, head: bytes, body: Body) -> None:
    writer.write(head)
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        writer.write(view[start : start + _PIECE_BYTES])
        await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    """One message: its kind, what it says, and the body behind it."""
    kind, content_bytes, body_bytes = MESSAGE_HEADER.unpack(await reader.readexactly(MESSAGE_HEADER.size))
    content = await reader.readexactly(content_bytes)
    body = bytearray()
    while len(body) < body_bytes:
        piece = await reader.read(min(_PIECE_BYTES, body_bytes - len(body)))
        if not piece:
            raise asyncio.IncompleteReadError(bytes(body), body_bytes)
        body += piece
    return kind, content, cast("Any", body)


def _failed() -> ApiError:
    return ApiError(500, "internal_error", "This gateway failed to read the body; its log says why.")
