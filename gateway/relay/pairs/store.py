"""LMCache's remote tier: the first replica stores the cache after the leg's answer, and the other one loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.relay.audit import read_usage
from gateway.relay.outgoing import NOTHING_GIVEN
from gateway.relay.pairs.protocol import COMPUTED, Told
from gateway.relay.pairs.store_waits import StoreWaits
from gateway.routing.ticket import Ticket


class StorePairs:
    def __init__(self) -> None:
        self._waits = StoreWaits()

    @property
    def asked(self) -> Mapping[str, Any]:
        return NOTHING_GIVEN

    def told(self, ticket: Ticket, leg: Ticket, document: dict[str, Any]) -> Told:
        usage = read_usage(document.get("usage"))
        ticket.prefill_cached_tokens = (usage.cached_tokens or 0) if usage is not None else 0
        return Told(COMPUTED, prompt_tokens=usage.prompt_tokens if usage is not None else 0)

    async def arrived(self, leg: Ticket, told: Told) -> str:
        return COMPUTED if await self._waits.has_stored(leg, told.prompt_tokens) else "unstored"
