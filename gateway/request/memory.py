"""Freed memory goes back to the system.

glibc keeps freed memory for the next allocation: 50 MB after a minute of 2 MB bodies. It gives memory back when it
is asked to. Other C libraries have no such call, and need none.
"""

from __future__ import annotations

import asyncio
import ctypes

LARGE_BYTES = 2**20
"""Smaller bodies leave too little behind to matter."""
_DELAY_S = 1.0
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Returns free memory to the system. It takes milliseconds, in which other Python threads run."""
    if _trim is not None:
        _trim(0)


class LargeBodies:
    """Gives memory back once a second, in a thread, while large bodies are released."""

    def __init__(self) -> None:
        self._is_due = False

    def released(self) -> None:
        """A large body was released."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)
