"""Processes that use Redis during a measurement. Each has its own interpreter, and so its own core.

All of them start together with the measuring process, once all are ready. Each runs for a given time, then reports.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from queue import Empty
from threading import BrokenBarrierError

import structlog
import uvloop

Found = dict[str, float]
Start = Callable[[], Awaitable[None]]
Work = Callable[[Start, str, float, int], Awaitable[Found]]
"""Called with `(start, redis_url, seconds, argument)`. It prepares, awaits the start and works for some seconds."""
_READY_S = 60.0
_SOON_S = 2.0
_SPAWNING = multiprocessing.get_context("spawn")


def _run(work: Work, barrier: Barrier, found: Queue[Found | str], url: str, seconds: float, argument: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

    async def start() -> None:
        await asyncio.to_thread(barrier.wait, _READY_S)

    async def run() -> Found:
        return await work(start, url, seconds, argument)

    try:
        found.put(uvloop.run(run()))
    except BrokenBarrierError:
        raise  # another process failed, and reports it itself
    except Exception:
        found.put(traceback.format_exc())
        barrier.abort()
        raise


class Company:
    """Processes that wait for the start."""

    def __init__(self, barrier: Barrier, found: Queue[Found | str], processes: int, seconds: float) -> None:
        self._barrier = barrier
        self._found = found
        self._processes = processes
        self._seconds = seconds

    async def start(self) -> None:
        """Starts them as soon as all are ready. Raises RuntimeError if one has failed."""
        try:
            await asyncio.to_thread(self._barrier.wait, _READY_S)
        except BrokenBarrierError:
            await self._next(_SOON_S)
            raise RuntimeError(f"not all of them were ready within {_READY_S:g} s") from None

    async def found(self) -> list[Found]:
        """The report of each process, when all have ended. Raises RuntimeError with the error of a failed one."""
        found = [await self._next(self._seconds + _READY_S) for _ in range(self._processes)]
        if None in found:
            raise RuntimeError("a process beside the measurement does not say what it found")
        return [each for each in found if each is not None]

    async def _next(self, within_s: float) -> Found | None:
        try:
            one = await asyncio.to_thread(self._found.get, True, within_s)
        except Empty:
            return None
        if isinstance(one, str):
            raise RuntimeError(f"a process beside the measurement failed:\n{one}")
        return one


@contextmanager
def company(work: Work | None, url: str, seconds: float, arguments: list[int]) -> Iterator[Company]:
    """A process for each argument; none without work."""
    arguments = arguments if work is not None else []
    barrier, found = _SPAWNING.Barrier(len(arguments) + 1), _SPAWNING.Queue()
    processes = [
        _SPAWNING.Process(target=_run, args=(work, barrier, found, url, seconds, argument), daemon=True)
        for argument in arguments
    ]
    for process in processes:
        process.start()
    try:
        yield Company(barrier, found, len(processes), seconds)
    finally:
        for process in processes:
            process.terminate()
            process.join()
