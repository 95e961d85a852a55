"""Whose turn it is: a few places, given out in turn to those who wait, one client after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """`async with turns.of(holder)` waits for a place. However much one holder asks for, another waits for at most one
    place to become free and one turn of each other holder."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """In the order of their turns."""

    def __repr__(self) -> str:
        waiting = {holder: len(futures) for holder, futures in self._waiting.items()}
        return f"<Turns {self._free} free, waiting: {waiting}>"

    @asynccontextmanager
    async def of(self, holder: str) -> AsyncIterator[None]:
        """A place, until the end of the block. Who is cancelled while waiting leaves the line."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(holder)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, holder: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self._pass_on()
            else:
                self._leave(holder, turn)
            raise

    def _leave(self, holder: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(holder)
        if line is not None and turn in line:  # else it was passed over already
            line.remove(turn)
            if not line:
                del self._waiting[holder]

    def _pass_on(self) -> None:
        while self._waiting:
            holder = next(iter(self._waiting))
            line = self._waiting.pop(holder)
            turn = line.popleft()
            if line:
                self._waiting[holder] = line  # behind all others
            if not turn.done():  # one that was cancelled leaves the line only when its task runs next
                turn.set_result(None)
                return
        self._free += 1
