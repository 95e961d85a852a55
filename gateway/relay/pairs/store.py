"""LMCache's remote tier: the first replica stores the cache after the leg's answer, and the other one loads it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gateway.relay.audit import read_usage
from gateway.relay.outgoing import NOTHING_GIVEN
from gateway.relay.pairs.protocol import COMPUTED, UNSTORED, LegAnswer, LegRequest
from gateway.relay.pairs.store_waits import StoreWaits
from gateway.routing.ticket import Ticket

_ASKED: Final = LegRequest(NOTHING_GIVEN)


class StorePairs:
    def __init__(self) -> None:
        self._waits = StoreWaits()

    async def asks(self, leg: Ticket) -> LegRequest:
        return _ASKED

    def told(self, ticket: Ticket, leg: Ticket, document: dict[str, Any]) -> LegAnswer:
        usage = read_usage(document.get("usage"))
        ticket.prefill_cached_tokens = (usage.cached_tokens or 0) if usage is not None else 0
        return LegAnswer(COMPUTED, prompt_tokens=usage.prompt_tokens if usage is not None else 0)

    async def arrived(self, leg: Ticket, told: LegAnswer, is_taken: asyncio.Event) -> str:
        return COMPUTED if await self._waits.has_stored(leg, told.prompt_tokens) else UNSTORED

    def failed(self, leg: Ticket) -> None: ...
