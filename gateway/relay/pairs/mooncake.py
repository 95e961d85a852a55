"""vLLM's MooncakeConnector: both replicas get the request at once, with one transfer id. The first one pushes the cache
to the other one when it has computed it. Asked for as in vLLM's mooncake_connector_proxy.py.

A transfer id is good once: vLLM (0.33) never frees the blocks of a leg whose id another one has, and who asks with an
id that was used waits. So nobody uses it again, not even on a connection that broke.

Whoever waits for a leg that never comes waits for up to nine minutes (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, and a
minute more): the engine that decodes does not see that the other one is gone. So the gateway looks after that.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Any, Final

from gateway.logs import RareWarning
from gateway.relay.audit import read_usage
from gateway.relay.pairs.bootstraps import Bootstraps
from gateway.relay.pairs.protocol import COMPUTED, LOG, REFERENCE, LegAnswer, LegRequest
from gateway.routing.ticket import Ticket

_LOOK_S: Final = 0.25
_LEAST_LOOKED_S: Final = 3.0
_GONE: Final = frozenset({"dead", "hung"})


class MooncakePairs:
    def __init__(self, bootstraps: Bootstraps) -> None:
        self._bootstraps = bootstraps
        hint = "start it with the MooncakeConnector; label the replica with the port of that server if it is not 8998"
        self._warned = RareWarning(LOG, "a prefill's bootstrap server does not tell its engine", hint=hint)

    async def asks(self, leg: Ticket) -> LegRequest | None:
        engine = await self._bootstraps.engine_of(leg)
        if engine is None:
            leg.failure = "no_engine_id"
            self._warned.warn(replica=leg.replica)
            return None
        transfer_id = f"xfer-{os.urandom(16).hex()}"  # a client can name the request's id, and twice
        first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        other = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": engine.address,
            "remote_engine_id": engine.id,
            "transfer_id": transfer_id,
        }
        return LegRequest({REFERENCE: first}, {REFERENCE: other})

    def told(self, ticket: Ticket, leg: Ticket, document: dict[str, Any]) -> LegAnswer:
        if not _is_cut(document):
            leg.failure = "not_cut"
            return LegAnswer("refused")
        usage = read_usage(document.get("usage"))
        ticket.prefill_cached_tokens = (usage.cached_tokens or 0) if usage is not None else 0
        return LegAnswer(COMPUTED)

    async def arrived(self, leg: Ticket, told: LegAnswer, is_taken: asyncio.Event) -> str:
        """Until the other replica has taken the cache, the engine that has it must live. An answer that is no stream
        does not show when that was. So this looks for as long as the prefill took, and for three seconds at least."""
        now_s = time.monotonic()
        until_s = now_s + max(_LEAST_LOOKED_S, now_s - leg.sent_s)
        while not is_taken.is_set() and time.monotonic() < until_s:
            life = leg.pool.records.get(leg.replica)
            if life is None or life.incarnation != leg.incarnation or life.state in _GONE:
                leg.failure = "gone"
                return "failed"
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await is_taken.wait()
        return COMPUTED

    def failed(self, leg: Ticket) -> None:
        self._bootstraps.forget(leg)


def _is_cut(document: dict[str, Any]) -> bool:
    """Whether the answer ended at its limit of one token. If it ended otherwise, vLLM gives the blocks to nobody."""
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return choice.get("finish_reason") == "length" or document.get("stop_reason") == "max_tokens"
