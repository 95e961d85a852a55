"""Waiting for what must come true, by asking until it does: never longer than it may take."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 0.05
# A machine that stands still for longer than a condition may take has not let anything come true.
_FEWEST_POLLS = 20


async def eventually(condition: Callable[[], Any], within_s: float = 10.0) -> Any:
    """The first true value of `condition`, which may be async; fails with the last false one when none came in time."""
    deadline = time.monotonic() + within_s
    polls = 0
    while True:
        value = condition()
        polls += 1
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline or polls < _FEWEST_POLLS, f"still {value!r} after {within_s:g} s"
        await asyncio.sleep(_POLL_S)
