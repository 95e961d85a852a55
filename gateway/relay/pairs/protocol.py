"""What differs between the protocols of pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import structlog

from gateway.relay.outgoing import NOTHING_GIVEN
from gateway.routing.ticket import Ticket

REFERENCE: Final = "kv_transfer_params"
COMPUTED: Final = "computed"
UNSTORED: Final = "unstored"
"""It was computed, and the other replica may not find all of it."""
LOG: Final = structlog.get_logger("kvgate.prefills")


class LegRequest(NamedTuple):
    """How a replica is asked for a leg."""

    fields: Mapping[str, Any]
    """What the body of the leg has, beside the request."""
    given: Mapping[str, Any] | None = None
    """The fields with which the replica that decodes gets the request at the same time. None: the leg's answer tells
    them."""


class LegAnswer(NamedTuple):
    """What became of a leg."""

    outcome: str
    """See kvgate_prefills_total."""
    given: Mapping[str, Any] = NOTHING_GIVEN
    """The fields with which the replica that decodes gets the request, if it did not get it before."""
    prompt_tokens: int = 0
    """As the replica tells; 0 if nobody needs it."""


class PairProtocol(Protocol):
    """How a prompt is computed for another replica. It has no state of a single leg."""

    async def asks(self, leg: Ticket) -> LegRequest | None:
        """None if the replica cannot be asked now."""

    def told(self, ticket: Ticket, leg: Ticket, document: dict[str, Any]) -> LegAnswer:
        """What the answer of a leg says."""

    async def arrived(self, leg: Ticket, told: LegAnswer, is_taken: asyncio.Event) -> str:
        """Waits until the other replica can take what was computed, or has taken it. The outcome of the leg."""

    def failed(self, leg: Ticket) -> None:
        """The other replica has to compute the prompt itself."""
