"""What large bodies leave behind: memory that is free, and not yet the system's."""

from __future__ import annotations

import asyncio

from gateway.request.memory import give_memory_back

LARGE_BYTES = 2**20
"""Smaller ones leave nothing behind that would count."""
_DELAY_S = 1.0


class LargeBodies:
    """While there are requests with large bodies, gives memory back once a second, in a thread."""

    def __init__(self) -> None:
        self._is_due = False

    def released(self) -> None:
        """One is not held any more."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)
