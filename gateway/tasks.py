"""Background tasks that nobody awaits: kept alive, logged when they fail, cancelled together on close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

_log = structlog.get_logger("kvgate.tasks")

_AGAIN_S = 1.0


class Tasks:
    """Owns background tasks. asyncio keeps only weak references to tasks; this keeps strong ones."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `coroutine`; if it raises, the failure is logged under `name`."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[Any]:
        """Run an endless `loop`. If it raises, the failure is logged and the loop starts again after a second, so that
        no input from one replica or record stops it for good."""
        return self.spawn(_kept(loop, name), name)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task failed", task=task.get_name(), error=repr(error))

    async def until_cancelled(self) -> None:
        """Wait until whoever awaits this is cancelled, and then close."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel all running tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _kept(loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    while True:
        try:
            return await loop()
        except Exception as error:
            _log.error("task failed", task=name, error=repr(error), hint="it begins again", exc_info=True)
            await asyncio.sleep(_AGAIN_S)
