"""What differs between the protocols of pairs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import structlog

from gateway.relay.outgoing import NOTHING_GIVEN
from gateway.routing.ticket import Ticket

REFERENCE: Final = "kv_transfer_params"
COMPUTED: Final = "computed"
_WARNED_EACH_S: Final = 3600.0
_log = structlog.get_logger("kvgate.prefills")


class Told(NamedTuple):
    """What became of a leg."""

    outcome: str
    """See kvgate_prefills_total."""
    given: Mapping[str, Any] = NOTHING_GIVEN
    """The fields with which the replica that decodes gets the request."""
    prompt_tokens: int = 0
    """As the replica tells; 0 if nobody needs it."""


class PairProtocol(Protocol):
    """How a prompt is computed for another replica. It has no state of a single leg."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """What the body of a leg has, beside the request."""

    def told(self, ticket: Ticket, leg: Ticket, document: dict[str, Any]) -> Told:
        """What the answer of a leg says."""

    async def arrived(self, leg: Ticket, told: Told) -> str:
        """Waits until the other replica can take what was computed. The outcome of the leg."""


class WarnedReplicas:
    """Warns of each replica once in an hour at most."""

    def __init__(self, event: str, hint: str) -> None:
        self._event, self._hint = event, hint
        self._at_s: dict[str, float] = {}

    def warn(self, replica: str) -> None:
        if (now_s := time.monotonic()) > self._at_s.get(replica, -_WARNED_EACH_S) + _WARNED_EACH_S:
            self._at_s[replica] = now_s
            _log.warning(self._event, replica=replica, hint=self._hint)
