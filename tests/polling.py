"""Waiting for what must come true, by asking until it does: never longer than it may take."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.05


async def eventually(condition: Callable[[], T | Awaitable[T]], within_s: float = 10.0) -> T:
    """The first true value of `condition`; fails with the last false one when none came in time."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        value: T = await found if inspect.isawaitable(found) else found
        if value:
            return value
        assert time.monotonic() < deadline, f"still {value!r} after {within_s:g} s"
        await asyncio.sleep(_POLL_S)
