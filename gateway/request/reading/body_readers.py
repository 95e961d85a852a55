"""Worker processes, which read bodies that would block the event loop for too long.

The JSON parser holds Python's lock, so a thread would not help. A worker starts when it is needed, and ends when it was
idle for `IDLE_S`. A worker is replaced after a very large body, because allocators rarely return memory. It is also
replaced if the client hangs up while it reads, and if it takes too long.
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
from gateway.request.reading.document import Body, BodyHead, BodyRules, ParsedBody, ResolveScopes
from gateway.request.reading.worker_process import (
    FAILURE,
    MESSAGE_HEADER,
    REFUSAL,
    RESULT,
    SCOPE_REQUEST,
    SCOPES,
    TASK,
    Task,
    encode_message,
)

_log = structlog.get_logger("kvgate.reading")

WORKERS = 2
LIMIT_S = 30.0
IDLE_S = 5.0
"""An idle process takes 25 MB; starting one takes 0.1 s."""
_LARGE_BYTES = 8 * 2**20
_PIECE_BYTES = 2**18


@dataclass(eq=False, slots=True)
class _Worker:
    """A process, and a connection to its standard input and output."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class BodyReaders:
    """Reads at most `WORKERS` bodies at a time in worker processes. Clients take turns."""

    def __init__(self) -> None:
        self.turns = FairTurns(WORKERS)
        """Callers of `read` take a turn first."""
        self._idle: dict[_Worker, asyncio.TimerHandle] = {}
        """Idle workers, each with the timer that ends it."""
        self._running: set[_Worker] = set()
        self._ending: set[asyncio.Future[int]] = set()

    async def read(self, head: BodyHead, body: Body, rules: BodyRules, resolve_scopes: ResolveScopes) -> ParsedBody:
        """Does what `read_body` does, in a worker process. Raises ApiError."""
        worker = self._take_idle() or await self._start()
        is_reusable = False
        try:
            async with asyncio.timeout(LIMIT_S):
                parsed = await self._converse(worker, Task(head, rules), body, resolve_scopes)
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
            worker, timer = self._idle.popitem()
            timer.cancel()
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

    async def _converse(self, worker: _Worker, task: Task, body: Body, resolve_scopes: ResolveScopes) -> ParsedBody:
        await _send(worker.writer, *encode_message(TASK, task, body))
        while True:
            kind, content, changed = await _receive(worker.reader)
            if kind == SCOPE_REQUEST:
                try:
                    scopes = resolve_scopes(*msgspec.msgpack.decode(content))
                except ApiError:
                    await _send(worker.writer, *encode_message(SCOPES, None))
                    raise
                await _send(worker.writer, *encode_message(SCOPES, scopes))
            elif kind == RESULT:
                parsed = msgspec.msgpack.decode(content, type=ParsedBody)
                parsed.body = changed or None
                return parsed
            elif kind == REFUSAL:
                raise ApiError(*msgspec.msgpack.decode(content))
            else:
                assert kind == FAILURE
                _log.error("reading a body failed", error=msgspec.msgpack.decode(content), path=task.head.path)
                raise _failed()

    def _end(self, worker: _Worker) -> None:
        self._running.discard(worker)
        worker.writer.close()
        self._reap(worker.process)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        waiting = asyncio.get_running_loop().run_in_executor(None, process.wait)
        self._ending.add(waiting)
        waiting.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Ends all worker processes."""
        for timer in self._idle.values():
            timer.cancel()
        for worker in list(self._running):
            self._end(worker)
        await asyncio.gather(*self._ending)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process. Returns it with a socket to its standard input and output.

    The event loop does not start it, because uvloop forks. That takes 40 ms if the gateway uses much memory; this takes
    2 ms.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: Python does not import files from the working directory.
        command = [sys.executable, "-P", "-m", "gateway.request.reading.worker_process"]
        return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno()), ours


async def _send(writer: asyncio.StreamWriter, message: bytes, body: Body) -> None:
    writer.write(message)
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        writer.write(view[start : start + _PIECE_BYTES])
        await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    """One message: its kind, its content as MessagePack, and its body."""
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
