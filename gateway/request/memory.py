"""Returns freed memory to the system: after large bodies, and after many connections were closed.

glibc keeps freed memory for later allocations: 50 MB after a minute of 2 MB bodies. It returns the memory when
`malloc_trim` is called. Other C libraries have no such call and do not need it.
"""

from __future__ import annotations

import asyncio
import ctypes

LARGE_BYTES = 2**20
"""Smaller bodies leave too little freed memory to matter."""
_DELAY_S = 1.0
_STORM = 200
"""So many connections."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Returns freed memory to the system. This takes milliseconds; other Python threads run meanwhile."""
    if _trim is not None:
        _trim(0)


class Storms:
    """Tells when a storm of connections is over: a TLS connection takes 40 KB, which glibc keeps."""

    def __init__(self) -> None:
        self._most = self._last = 0

    def is_over(self, connections: int) -> bool:
        """Call it again and again. True once if there are far fewer connections than there were, and as many as at the
        last call."""
        is_quiet, self._last = connections >= self._last, connections
        self._most = max(self._most, connections)
        if not is_quiet or self._most - connections < _STORM:
            return False
        self._most = connections
        return True


class LargeBodies:
    """Returns freed memory at most once a second, in a thread, after large bodies were released."""

    def __init__(self) -> None:
        self._is_due = False

    def released(self) -> None:
        """Tells that a large body was released."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)
