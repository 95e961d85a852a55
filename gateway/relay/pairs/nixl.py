"""vLLM's NixlConnector: the answer of a leg has a reference (`kv_transfer_params`), with which the other replica
fetches the cache. Asked for as in vLLM's toy_proxy_server.py.

A reference is good once: a second use can give the answer of another prompt (vLLM #52234).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gateway.logs import RareWarning
from gateway.relay.pairs.protocol import COMPUTED, LOG, REFERENCE, LegAnswer, LegRequest
from gateway.routing.ticket import Ticket

_PARAMS: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_ASKED: Final = LegRequest({REFERENCE: _PARAMS})


class NixlPairs:
    def __init__(self) -> None:
        hint = "start it with the NixlConnector, or set pairs.protocol: each such prompt is computed twice"
        self._warned = RareWarning(LOG, "a prefill gives no reference", hint=hint)

    async def asks(self, leg: Ticket) -> LegRequest:
        return _ASKED

    def told(self, ticket: Ticket, leg: Ticket, document: dict[str, Any]) -> LegAnswer:
        reference = _reference(document)
        if reference is None:
            leg.failure = "no_reference"
            self._warned.warn(replica=leg.replica)
            return LegAnswer("refused")
        return LegAnswer(COMPUTED, {REFERENCE: reference})

    async def arrived(self, leg: Ticket, told: LegAnswer, is_taken: asyncio.Event) -> str:
        return told.outcome

    def failed(self, leg: Ticket) -> None: ...


def _reference(document: dict[str, Any]) -> dict[str, Any] | None:
    """What an answer gives to the replica that decodes; None if it gives nothing that can be used: a reference without
    blocks ends vLLM's engine (0.33)."""
    reference = document.get(REFERENCE)
    if not isinstance(reference, dict) or reference.get("do_remote_prefill") is not True:
        return None
    blocks = reference.get("remote_block_ids")
    return reference if isinstance(blocks, list) and any(blocks) else None
