"""Processes that read bodies which would hold the event loop for too long.

JSON's parser keeps Python's lock, so a thread would not help. A process is started when it is first needed. One that
has read a very large body is replaced, since an allocator rarely gives its memory back; so is one whose client hung up
meanwhile, and one that takes too long.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, cast

import msgspec
import structlog

from gateway.errors import ApiError
from gateway.reading.document import Ask, Body, Reading, Resolve, Rules
from gateway.reading.process import ENGINE, FAILURE, HEAD, QUESTION, READING, REFUSAL, TASK, Task, message
from gateway.reading.turns import Turns

_log = structlog.get_logger("kvgate.reading")

WORKERS = 2
LIMIT_S = 30.0
_LARGE_BYTES = 8 * 2**20
_PIECE_BYTES = 2**18


class Workers:
    """Reads bodies in processes of its own, `WORKERS` at a time, fairly between clients. `close` it at the end."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.turns = Turns(WORKERS)
        """Wait here for a turn before `read`."""
        self._idle: list[Process] = []
        self._running: set[Process] = set()

    async def read(self, ask: Ask, body: Body, resolve: Resolve) -> Reading:
        """As `read_body`, in another process. Raises ApiError."""
        process = self._idle.pop() if self._idle else await self._start()
        is_reusable = False
        try:
            async with asyncio.timeout(LIMIT_S):
                reading = await self._converse(process, ask, body, resolve)
            is_reusable = len(body) < _LARGE_BYTES
        except ApiError:
            is_reusable = len(body) < _LARGE_BYTES
            raise
        except TimeoutError:
            _log.error("reading a body took too long", limit_s=LIMIT_S, body_bytes=len(body), path=ask.path)
            raise _failed() from None
        except (asyncio.IncompleteReadError, OSError):
            _log.error("the process that read a body has ended", body_bytes=len(body), path=ask.path)
            raise _failed() from None
        finally:
            if is_reusable:
                self._idle.append(process)
            else:
                self._end(process)
        return reading

    async def _start(self) -> Process:
        # -P: what lies in the working directory is not imported.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "gateway.reading.process", stdin=PIPE, stdout=PIPE, limit=_PIECE_BYTES
        )
        self._running.add(process)
        return process

    async def _converse(self, process: Process, ask: Ask, body: Body, resolve: Resolve) -> Reading:
        await _send(process, *message(TASK, Task(ask, self._rules), body))
        while True:
            kind, told, changed = await _receive(process)
            if kind == QUESTION:
                try:
                    engine = resolve(*msgspec.msgpack.decode(told))
                except ApiError:
                    await _send(process, *message(ENGINE, None))
                    raise
                await _send(process, *message(ENGINE, engine))
            elif kind == READING:
                reading = msgspec.msgpack.decode(told, type=Reading)
                reading.body = changed or None
                return reading
            elif kind == REFUSAL:
                raise ApiError(*msgspec.msgpack.decode(told))
            else:
                assert kind == FAILURE
                _log.error("reading a body failed", error=msgspec.msgpack.decode(told), path=ask.path)
                raise _failed()

    def _end(self, process: Process) -> None:
        self._running.discard(process)
        if process.returncode is None:
            process.kill()

    async def close(self) -> None:
        """End the processes."""
        ended = list(self._running)
        for process in ended:
            self._end(process)
        await asyncio.gather(*(process.wait() for process in ended))


async def _send(process: Process, head: bytes, body: Body) -> None:
    assert process.stdin is not None
    process.stdin.write(head)
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        process.stdin.write(view[start : start + _PIECE_BYTES])
        await process.stdin.drain()


async def _receive(process: Process) -> tuple[bytes, bytes, bytes]:
    """One message: its kind, what it says, and the body behind it."""
    assert process.stdout is not None
    kind, told_bytes, body_bytes = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
    told = await process.stdout.readexactly(told_bytes)
    body = bytearray()
    while len(body) < body_bytes:
        piece = await process.stdout.read(min(_PIECE_BYTES, body_bytes - len(body)))
        if not piece:
            raise asyncio.IncompleteReadError(bytes(body), body_bytes)
        body += piece
    return kind, told, cast("Any", body)


def _failed() -> ApiError:
    return ApiError(500, "internal_error", "This gateway failed to read the body; its log says why.")
