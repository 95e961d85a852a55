"""Memory that was freed goes back to the system.

glibc keeps it for the next allocation: 50 MB after a minute of 2 MB bodies. It gives it back when it is asked to; other
C libraries have no such call, and need none.
"""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Return what is free to the system. It takes milliseconds; Python's lock is free meanwhile."""
    if _trim is not None:
        _trim(0)
