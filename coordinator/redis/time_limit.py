"""Waiting for a reply with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from coordinator.errors import StoreLate

_Reply = TypeVar("_Reply")


async def answered(reply: Awaitable[_Reply], within_s: float) -> _Reply:
    """Redis' reply. Raises StoreLate after `within_s` seconds without one, and whatever `reply` raises."""
    try:
        async with asyncio.timeout(within_s):
            return await reply
    except TimeoutError:
        raise StoreLate(f"no answer from Redis within {within_s:g} s") from None
