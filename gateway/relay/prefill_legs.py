"""Prefill legs: one replica computes a prompt, and another one takes the KV cache from it and decodes.

The leg is the client's request, with one token to generate. How the cache gets to the other replica is the protocol's:

- `nixl`: the leg's answer has a reference (`kv_transfer_params`), which the other replica gets with the request, and
  with which it fetches the cache (vLLM's NixlConnector; asked for as in vLLM's toy_proxy_server.py). A reference is
  good once: a second use can give the answer of another prompt (vLLM #52234). So it is no part of the request. It goes
  into one body, on a connection of its own, and nothing sends this body again.
- `store`: the first replica stores the cache in LMCache's remote tier, and the other one loads it from there. LMCache
  stores it after the leg's answer.

If the leg fails, the replica that decodes computes the prompt itself. It has a place for the request already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson
import structlog

from gateway.deadlines import Deadlines
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.audit import read_usage
from gateway.relay.beginnings import gathered
from gateway.relay.held import HeldBytes
from gateway.relay.moves import Moves
from gateway.relay.outgoing import NOTHING_GIVEN, Outgoing, asks_report
from gateway.relay.retries import SWITCHED
from gateway.relay.store_waits import StoreWaits
from gateway.request.job import Job
from gateway.request.reading.edit import Edit, edited
from gateway.routing.failures import ReplicaFailures
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings
from gateway.upstream import Upstream, UpstreamError

REFERENCE: Final = "kv_transfer_params"
_ASKED: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's own proxy asks."""
_LEFT_OUT: Final = frozenset({"stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs"})
"""Fields that one token does not need, or contradicts."""
_MOST_ANSWER_BYTES: Final = 2**20
_WARNED_EACH_S: Final = 3600.0
_log = structlog.get_logger("kvgate.prefills")
_INLINE_BYTES: Final = 2**18
"""A larger body is edited in a thread."""


class _Outcome(NamedTuple):
    """What became of a leg: see kvgate_prefills_total."""

    outcome: str
    given: Mapping[str, Any] = NOTHING_GIVEN
    prompt_tokens: int = 0
    """As the replica tells; 0 if nobody needs it."""


class PrefillLegs:
    """Those of one gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        moves: Moves,
        outgoing: Outgoing,
        upstream: Upstream,
        failures: ReplicaFailures,
        metrics: Metrics,
    ) -> None:
        self.use(settings)
        self._moves, self._outgoing, self._upstream = moves, outgoing, upstream
        self._failures, self._metrics = failures, metrics
        self._deadlines, self._waits = Deadlines(), StoreWaits()
        self._warned_s: dict[str, float] = {}

    def use(self, settings: GatewaySettings) -> None:
        """These hold from now on."""
        self._gives_reference = settings.pairs.protocol == "nixl"
        self._first_byte_s = settings.timeouts.first_byte_s

    async def given(self, job: Job, ticket: Ticket, held: HeldBytes, task: asyncio.Task[None]) -> Mapping[str, Any]:
        """Has the prompt computed, if a ticket says where. Returns the fields with which the replica that decodes gets
        it: none if it loads it from the store, or computes it itself."""
        leg, outcome = ticket.prefill, "left"
        if leg is None:
            return NOTHING_GIVEN
        try:
            outcome, given, prompt_tokens = await self._led(job, ticket, leg, held, task)
            if outcome == "computed" and not given and not await self._waits.has_stored(leg, prompt_tokens):
                outcome = "unstored"
            return given
        finally:
            self._metrics.prefills.inc(outcome)

    async def _led(self, job: Job, ticket: Ticket, leg: Ticket, held: HeldBytes, task: asyncio.Task[None]) -> _Outcome:
        """The leg, until it holds no load any more."""
        result = _Outcome("left")
        try:
            result = await self._computed(job, ticket, leg, held, task)
            return result
        finally:
            ticket.is_prefilled = result.outcome == "computed"
            if ticket.is_prefilled:
                leg.computed()
            else:
                if leg.failure != SWITCHED:
                    job.route.pairs_no_more()
                ticket.computes_itself()
            leg.ended()
            leg.done()

    async def _computed(
        self, job: Job, ticket: Ticket, leg: Ticket, held: HeldBytes, task: asyncio.Task[None]
    ) -> _Outcome:
        try:
            with (
                self._deadlines.within(self._first_byte_s, task) as limit,
                self._moves.attempt(leg.replica, (ticket.replica,), (), limit, size_bytes=len(job.body)) as waiting,
            ):
                waiting.has_place = True
                leg.sent_s = time.monotonic()
                status, body = await self._asked(job, leg, held)
        except TimeoutError:
            leg.failure = "timeout"
            return _Outcome("left")
        except UpstreamError as error:
            leg.failure = error.reason
            self._failures.failed(leg)
            return _Outcome("failed")
        if self._outgoing.has_switched(job, leg, status, body):
            leg.failure = SWITCHED
            return _Outcome("refused")
        if status != 200:
            leg.failure = f"status_{status}"  # whose fault a 5xx is, the other replica's answer tells
            return _Outcome("failed" if status >= 500 else "refused")
        self._failures.succeeded(leg, is_proof=True)
        document = _document(body)
        if not self._gives_reference:
            usage = read_usage(document.get("usage"))
            ticket.prefill_cached_tokens = (usage.cached_tokens or 0) if usage is not None else 0
            return _Outcome("computed", prompt_tokens=usage.prompt_tokens if usage is not None else 0)
        reference = _reference(document)
        if reference is None:
            leg.failure = "no_reference"
            self._warn(leg.replica)
            return _Outcome("refused")
        return _Outcome("computed", {REFERENCE: reference})

    def _warn(self, replica: str) -> None:
        """Once of each replica, in an hour at most."""
        if (now_s := time.monotonic()) > self._warned_s.get(replica, -_WARNED_EACH_S) + _WARNED_EACH_S:
            self._warned_s[replica] = now_s
            hint = "start it with the NixlConnector, or set pairs.protocol: each such prompt is computed twice"
            _log.warning("a prefill gives no reference", replica=replica, hint=hint)

    async def _asked(self, job: Job, leg: Ticket, held: HeldBytes) -> tuple[int, bytes]:
        """The replica's answer. Raises UpstreamError."""
        body, headers = await self._body(job, leg), self._outgoing.headers(job, leg, "prefill")
        answer = await self._upstream.send(job.method, leg.url, job.target, headers, (body,))
        try:
            is_whole = await gathered(answer, held)
            return answer.status, answer.take() if is_whole else b""
        finally:
            answer.close()

    async def _body(self, job: Job, leg: Ticket) -> bytes:
        added: dict[str, Any] = {"stream": False, "max_tokens": 1}
        if job.endpoint.prompt == "chat":
            added["max_completion_tokens"] = 1
        if self._gives_reference:
            added[REFERENCE] = _ASKED
        if job.other_name:
            added["model"] = job.other_name
        if leg.placement is not None:
            added |= asks_report(job, leg.placement)
        edit = Edit(cut=set(_LEFT_OUT), added=added)
        body = bytes(job.body)
        return edited(body, edit) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(edited, body, edit)


def _document(body: bytes) -> dict[str, Any]:
    """The answer of a leg; empty if it cannot be read."""
    if len(body) > _MOST_ANSWER_BYTES:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _reference(document: dict[str, Any]) -> dict[str, Any] | None:
    """What an answer gives to the replica that decodes; None if it gives nothing that can be used: a reference without
    blocks ends vLLM's engine (0.33)."""
    reference = document.get(REFERENCE)
    if not isinstance(reference, dict) or reference.get("do_remote_prefill") is not True:
        return None
    blocks = reference.get("remote_block_ids")
    return reference if isinstance(blocks, list) and any(blocks) else None
