"""Prefill legs: one replica computes a prompt, and another one takes the KV cache from it and decodes.

The leg is the client's request, with one token to generate. How the cache gets to the other replica is the protocol's
(pairs/). What the other replica gets for that is good once: so it is no part of the request. It goes into one body, on
a connection of its own, and nothing sends this body again.

If the leg fails, the replica that decodes computes the prompt itself. It has a place for the request already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.deadlines import Deadlines
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.beginnings import gathered
from gateway.relay.held import HeldBytes
from gateway.relay.moves import Moves
from gateway.relay.outgoing import NOTHING_GIVEN, Outgoing, asks_report
from gateway.relay.pairs.nixl import NixlPairs
from gateway.relay.pairs.protocol import COMPUTED, PairProtocol, Told
from gateway.relay.pairs.store import StorePairs
from gateway.relay.retries import SWITCHED
from gateway.request.job import Job
from gateway.request.reading.edit import Edit, edited
from gateway.routing.failures import ReplicaFailures
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings
from gateway.upstream import Upstream, UpstreamError

_LEFT_OUT: Final = frozenset({"stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs"})
"""Fields that one token does not need, or contradicts."""
_MOST_ANSWER_BYTES: Final = 2**20
_INLINE_BYTES: Final = 2**18
"""A larger body is edited in a thread."""


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
        self._protocols: dict[str, PairProtocol] = {"nixl": NixlPairs(), "store": StorePairs()}
        self.use(settings)
        self._moves, self._outgoing, self._upstream = moves, outgoing, upstream
        self._failures, self._metrics = failures, metrics
        self._deadlines = Deadlines()

    def use(self, settings: GatewaySettings) -> None:
        """These hold from now on."""
        self._protocol = self._protocols[settings.pairs.protocol]
        self._first_byte_s = settings.timeouts.first_byte_s

    async def given(self, job: Job, ticket: Ticket, held: HeldBytes, task: asyncio.Task[None]) -> Mapping[str, Any]:
        """Has the prompt computed, if a ticket says where. Returns the fields with which the replica that decodes gets
        it: none if it loads it from the store, or computes it itself."""
        leg, outcome, protocol = ticket.prefill, "left", self._protocol
        if leg is None:
            return NOTHING_GIVEN
        try:
            told = await self._led(job, ticket, leg, protocol, held, task)
            outcome = told.outcome
            if outcome == COMPUTED:
                outcome = await protocol.arrived(leg, told)
            return told.given
        finally:
            self._metrics.prefills.inc(outcome)

    async def _led(
        self, job: Job, ticket: Ticket, leg: Ticket, protocol: PairProtocol, held: HeldBytes, task: asyncio.Task[None]
    ) -> Told:
        """The leg, until it holds no load any more."""
        result = Told("left")
        try:
            result = await self._computed(job, ticket, leg, protocol, held, task)
            return result
        finally:
            ticket.is_prefilled = result.outcome == COMPUTED
            if ticket.is_prefilled:
                leg.computed()
            else:
                if leg.failure != SWITCHED:
                    job.route.pairs_no_more()
                ticket.computes_itself()
            leg.ended()
            leg.done()

    async def _computed(
        self, job: Job, ticket: Ticket, leg: Ticket, protocol: PairProtocol, held: HeldBytes, task: asyncio.Task[None]
    ) -> Told:
        try:
            with (
                self._deadlines.within(self._first_byte_s, task) as limit,
                self._moves.attempt(leg.replica, (ticket.replica,), (), limit, size_bytes=len(job.body)) as waiting,
            ):
                waiting.has_place = True
                leg.sent_s = time.monotonic()
                status, body = await self._asked(job, leg, protocol, held)
        except TimeoutError:
            leg.failure = "timeout"
            return Told("left")
        except UpstreamError as error:
            leg.failure = error.reason
            self._failures.failed(leg)
            return Told("failed")
        if self._outgoing.has_switched(job, leg, status, body):
            leg.failure = SWITCHED
            return Told("refused")
        if status != 200:
            leg.failure = f"status_{status}"  # whose fault a 5xx is, the other replica's answer tells
            return Told("failed" if status >= 500 else "refused")
        self._failures.succeeded(leg, is_proof=True)
        return protocol.told(ticket, leg, _document(body))

    async def _asked(self, job: Job, leg: Ticket, protocol: PairProtocol, held: HeldBytes) -> tuple[int, bytes]:
        """The replica's answer. Raises UpstreamError."""
        body, headers = await self._body(job, leg, protocol), self._outgoing.headers(job, leg, "prefill")
        answer = await self._upstream.send(job.method, leg.url, job.target, headers, (body,))
        try:
            is_whole = await gathered(answer, held)
            return answer.status, answer.take() if is_whole else b""
        finally:
            answer.close()

    async def _body(self, job: Job, leg: Ticket, protocol: PairProtocol) -> bytes:
        added: dict[str, Any] = {"stream": False, "max_tokens": 1, **protocol.asked}
        if job.endpoint.prompt == "chat":
            added["max_completion_tokens"] = 1
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
