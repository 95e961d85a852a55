"""Prefill legs: one replica computes a prompt, and another one takes the KV cache from it and decodes.

The leg is the client's request, with one token to generate. How the cache gets to the other replica is the protocol's
(pairs/). What the other replica gets for that is good once: so it is no part of the request. It goes into one body, on
a connection of its own, and nothing sends this body again.

If the leg fails, the replica that decodes computes the prompt itself. It has a place for the request already. If it got
the request at the same time as the leg, it waits in vain then: its attempt ends (UNPREFILLED), and begins again there.
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
from gateway.relay.moves import Moves, WaitingAttempt
from gateway.relay.outgoing import NOTHING_GIVEN, Outgoing, asks_report
from gateway.relay.pairs.bootstraps import Bootstraps
from gateway.relay.pairs.mooncake import MooncakePairs
from gateway.relay.pairs.nixl import NixlPairs
from gateway.relay.pairs.protocol import COMPUTED, UNSTORED, LegAnswer, LegRequest, PairProtocol
from gateway.relay.pairs.recent_legs import RecentLegs
from gateway.relay.pairs.store import StorePairs
from gateway.relay.retries import SWITCHED, UNPREFILLED
from gateway.replicas.fleet import Fleet
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.request.reading.edit import Edit, edited
from gateway.routing.failures import ReplicaFailures
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings
from gateway.tasks import Tasks
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
        fleet: Fleet,
        moves: Moves,
        outgoing: Outgoing,
        upstream: Upstream,
        failures: ReplicaFailures,
        admission: Admission,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        mooncake = MooncakePairs(Bootstraps(fleet, upstream, tasks))
        self._protocols: dict[str, PairProtocol] = {"nixl": NixlPairs(), "store": StorePairs(), "mooncake": mooncake}
        self._protocol, self.recent = self._protocols[settings.pairs.protocol], RecentLegs()
        self.use(settings)
        self.moves, self.outgoing, self.upstream, self.failures = moves, outgoing, upstream, failures
        self.admission, self.metrics, self.tasks = admission, metrics, tasks
        self.deadlines = Deadlines()

    def use(self, settings: GatewaySettings) -> None:
        """These hold from now on."""
        if (protocol := self._protocols[settings.pairs.protocol]) is not self._protocol:
            self._protocol = protocol
            self.recent.clear()
        self.first_byte_s = settings.timeouts.first_byte_s

    def begin(self, job: Job, ticket: Ticket) -> PrefillLeg | NoLeg:
        """Has the prompt computed, if a ticket says where."""
        return NO_LEG if ticket.prefill is None else PrefillLeg(self, self._protocol, job, ticket, ticket.prefill)


class PrefillLeg:
    """One of them, in a task of its own."""

    def __init__(self, legs: PrefillLegs, protocol: PairProtocol, job: Job, ticket: Ticket, leg: Ticket) -> None:
        self._legs, self._protocol, self._job, self._ticket, self._leg = legs, protocol, job, ticket, leg
        self._handed: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._is_beside = self._is_lost = False
        """Whether both got the request at the same time; whether the other one waits in vain since then."""
        self._is_taken = asyncio.Event()
        self._waiting: WaitingAttempt | None = None
        self._task: asyncio.Task[None] = legs.tasks.spawn(self._run(), "a prefill leg")

    async def handed_over(self) -> None:
        """Waits until the replica that decodes may get the request."""
        await self._handed

    @property
    def given(self) -> Mapping[str, Any]:
        """The fields that this request gains. Empty if decode loads the cache from the store, or computes it itself."""
        return self._handed.result()

    def waits(self, waiting: WaitingAttempt) -> None:
        """The replica that decodes gets the request now."""
        if not self._is_beside:
            return
        self._waiting = waiting
        if not self._leg.is_over:
            waiting.waits_for_prefill()
        if self._is_lost:
            waiting.move(UNPREFILLED)

    def taken(self) -> None:
        """The replica that decodes answers."""
        self._waiting = None
        self._is_taken.set()

    def end(self) -> None:
        """Nobody waits for it any more."""
        self._waiting = None
        self._task.cancel()

    async def _run(self) -> None:
        given, outcome, held = NOTHING_GIVEN, "left", HeldBytes(self._legs.admission)
        try:
            told = await self._led(held)
            given, outcome = told.given, told.outcome
            if outcome == COMPUTED:
                self._ticket.is_prefilled = True
                outcome = await self._protocol.arrived(self._leg, told, self._is_taken)
            if outcome not in (COMPUTED, UNSTORED):
                self._fail()
        except Exception:  # a fault of this code: the other replica must not wait for what never comes
            self._fail()
            raise
        finally:
            held.let_go()
            self._legs.metrics.prefills.inc(outcome)
            self._legs.recent.note(self._leg, outcome)
            if not self._handed.done():
                self._handed.set_result(given)

    def _fail(self) -> None:
        """The replica that decodes computes the prompt, unless it answers already."""
        self._protocol.failed(self._leg)
        if self._is_taken.is_set():
            return
        self._ticket.is_prefilled, self._ticket.prefill_cached_tokens = False, None
        if self._leg.failure != SWITCHED:
            self._job.route.pairs_no_more()
        self._ticket.computes_itself()
        self._is_lost = self._is_beside
        if self._waiting is not None:
            self._waiting.move(UNPREFILLED)

    async def _led(self, held: HeldBytes) -> LegAnswer:
        """Until it holds no load any more."""
        try:
            told = await self._computed(held)
            if told.outcome == COMPUTED:
                self._leg.computed()
            return told
        finally:
            if self._waiting is not None:
                self._waiting.is_prefilled()
            self._leg.ended()
            self._leg.done()

    async def _computed(self, held: HeldBytes) -> LegAnswer:
        legs, leg, size_bytes = self._legs, self._leg, len(self._job.body)
        asked = await self._protocol.asks(leg)
        if asked is None:
            return LegAnswer("failed")
        if asked.given is not None:
            self._hand_over(asked.given)
        try:
            with (
                legs.deadlines.within(legs.first_byte_s, self._task) as limit,
                legs.moves.attempt(leg.replica, (self._ticket.replica,), (), limit, size_bytes=size_bytes) as waiting,
            ):
                waiting.has_place = True
                leg.sent_s = time.monotonic()
                status, body = await self._answer(asked, held)
        except TimeoutError:
            leg.failure = "timeout"
            return LegAnswer("left")
        except UpstreamError as error:
            leg.failure = error.reason
            legs.failures.failed(leg)
            return LegAnswer("failed")
        if legs.outgoing.has_switched(self._job, leg, status, body):
            leg.failure = SWITCHED
            return LegAnswer("refused")
        if status != 200:
            leg.failure = f"status_{status}"  # whose fault a 5xx is, the other replica's answer tells
            return LegAnswer("failed" if status >= 500 else "refused")
        legs.failures.succeeded(leg, is_proof=True)
        return self._protocol.told(self._ticket, leg, _document(body))

    def _hand_over(self, given: Mapping[str, Any]) -> None:
        """Both get the request now."""
        self._is_beside = True
        self._ticket.is_prefilled, self._ticket.prefill_cached_tokens = True, 0  # until the leg's answer tells
        if not self._handed.done():
            self._handed.set_result(given)

    async def _answer(self, asked: LegRequest, held: HeldBytes) -> tuple[int, bytes]:
        """The replica's answer. Raises UpstreamError."""
        legs, job, leg, is_sent_once = self._legs, self._job, self._leg, asked.given is not None
        body, headers = await _body(job, leg, asked.fields), legs.outgoing.headers(job, leg, "prefill")
        answer = await legs.upstream.send(job.method, leg.url, job.target, headers, (body,), is_sent_once)
        try:
            is_whole = await gathered(answer, held)
            return answer.status, answer.take() if is_whole else b""
        finally:
            answer.close()


class NoLeg:
    """Of a request whose prompt is computed where it is decoded."""

    given = NOTHING_GIVEN

    async def handed_over(self) -> None: ...

    def waits(self, waiting: WaitingAttempt) -> None: ...

    def taken(self) -> None: ...

    def end(self) -> None: ...


NO_LEG: Final = NoLeg()


async def _body(job: Job, leg: Ticket, fields: Mapping[str, Any]) -> bytes:
    added: dict[str, Any] = {"stream": False, "max_tokens": 1, **fields}
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
