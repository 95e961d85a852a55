"""Waits until another replica can load what a prefill has computed: LMCache stores it after the prefill's answer.

A wait lasts no longer than the prefill took, or 0.25 s: to compute the prompt again is then as quick. Where waits were
in vain several times in a row, there is none for a while: LMCache may use another Redis, or its network may be slower
than the engine computes.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from contextlib import suppress
from typing import Final

import structlog

from coordinator.errors import StoreError
from coordinator.pool.stored_chunks import until_stored
from coordinator.registry import SESSION
from gateway.routing.ticket import Ticket

_LEAST_WAIT_S: Final = 0.25
"""Agents hear of what was computed within a tenth of a second."""
_MOST_IN_VAIN: Final = 3
_REST_S: Final = 60.0
_log = structlog.get_logger("kvgate.prefills")


class StoreWaits:
    """Those of one gateway."""

    def __init__(self) -> None:
        self._in_vain: dict[str, int] = {}
        """How many waits in a row, by the replica that had computed the prompts."""
        self._rests_until_s: dict[str, float] = {}

    async def has_stored(self, leg: Ticket, prompt_tokens: int) -> bool:
        """Waits until what this leg computed can be loaded. False: it is not stored, as far as anybody knows; True also
        if nobody knows."""
        if leg.placement is None or leg.placement.mode != SESSION:
            return True
        if time.monotonic() < self._rests_until_s.get(leg.replica, 0.0):
            return False
        # Where the keys end is an estimate until the prompt was measured: agents place none that would end behind it.
        keys = leg.request.keys[: bisect_right(leg.request.tokens, prompt_tokens)]
        life = leg.pool.records.get(leg.replica)
        if not keys or life is None or life.incarnation != leg.incarnation:
            return True
        limit_s, is_stored = max(_LEAST_WAIT_S, time.monotonic() - leg.sent_s), False
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(limit_s):
                is_stored = await until_stored(leg.pool, keys, leg.placement.matched_keys, life)
        self._note(leg.replica, is_stored)
        return is_stored

    def _note(self, replica: str, is_stored: bool) -> None:
        in_vain = self._in_vain[replica] = 0 if is_stored else self._in_vain.get(replica, 0) + 1
        if in_vain >= _MOST_IN_VAIN:
            if in_vain == _MOST_IN_VAIN:
                hint = "its LMCache must use this Redis, over a network that is faster than the engine computes"
                _log.warning("what a prefill computes is not stored in time", replica=replica, hint=hint)
            self._rests_until_s[replica] = time.monotonic() + _REST_S
