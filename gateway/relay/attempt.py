"""One attempt: send a request to the replica where it was placed, and relay the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from coordinator.registry import ASLEEP
from gateway.deadlines import Deadlines, Limit
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.beginnings import Said, begins, begun, declined, failure_of, gathered, says
from gateway.relay.charges import Charges
from gateway.relay.elsewhere import Elsewhere
from gateway.relay.hedges import Hedges
from gateway.relay.held import HeldBytes
from gateway.relay.moves import Moves, WaitingAttempt
from gateway.relay.outgoing import Outgoing
from gateway.relay.prefill_legs import NO_LEG, NoLeg, PrefillLeg, PrefillLegs
from gateway.relay.relay import Relay, StreamBroken
from gateway.relay.reply import Reply
from gateway.relay.resumptions import Resumptions
from gateway.relay.retries import (
    DRAINED,
    HEDGED,
    NO_PREFILL,
    RETRIED_STATUSES,
    SWITCHED,
    UNPREFILLED,
    Failure,
    held_against_replicas,
    is_refusal,
)
from gateway.relay.second import Second
from gateway.relay.tries import Tries
from gateway.replicas.fleet import Fleet
from gateway.request.job import Job
from gateway.routing.failures import ReplicaFailures
from gateway.routing.ticket import Ticket
from gateway.settings.limit_settings import TimeoutSettings
from gateway.upstream import Answer, Buffer, UpstreamError


class Sends(Protocol):
    """Where requests are sent to: see Upstream."""

    def send(
        self,
        method: str,
        url: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[Buffer] = (),
        has_effects: bool = False,
    ) -> Coroutine[Any, Any, Answer]: ...


class Attempt:
    """Sends requests to replicas, one attempt at a time."""

    def __init__(
        self,
        timeouts: TimeoutSettings,
        *,
        fleet: Fleet,
        failures: ReplicaFailures,
        outgoing: Outgoing,
        upstream: Sends,
        moves: Moves,
        elsewhere: Elsewhere,
        prefill_legs: PrefillLegs,
        hedges: Hedges,
        relay: Relay,
        resumptions: Resumptions,
        charges: Charges,
        metrics: Metrics,
        deadlines: Deadlines,
    ) -> None:
        self.use(timeouts)
        self._deadlines = deadlines
        self._fleet, self._failures, self._outgoing, self._upstream = fleet, failures, outgoing, upstream
        self._moves, self._elsewhere, self._prefill_legs, self._hedges = moves, elsewhere, prefill_legs, hedges
        self._relay, self._resumptions, self._charges, self._metrics = relay, resumptions, charges, metrics

    def use(self, timeouts: TimeoutSettings) -> None:
        """Attempts that begin from now on have these timeouts."""
        self._first_byte_s = timeouts.first_byte_s

    async def run(self, job: Job, tries: Tries, reply: Reply, held: HeldBytes) -> Failure | None:
        """The current attempt, and a second one beside it if it is late. None if the client was answered, whatever the
        answer was. Raises ApiError, and StreamBroken if the answer has begun."""
        failure = await self._first(job, tries, reply, held)
        if failure is not None and (second := tries.second) is not None and second.failure is None:
            return await self._answered_by_second(job, tries, reply, second, failure)
        return failure

    def failed(self, tries: Tries, failure: Failure) -> None:
        """The current attempt has failed."""
        if tries.failed(failure) and failure.reason in (ASLEEP, SWITCHED):
            self._metrics.retries.inc(failure.reason)

    def count(self, tries: Tries, *, was_answered: bool) -> None:
        """Counts server errors against their replicas, unless they are the request's own fault."""
        for index in held_against_replicas(tries.failures, was_answered):
            self._failures.failed(tries.tickets[index])

    async def _first(self, job: Job, tries: Tries, reply: Reply, held: HeldBytes) -> Failure | None:
        """One attempt, with the last ticket. None if the client was answered, whatever the answer was."""
        ticket = tries.ticket
        leg = self._prefill_legs.begin(job, ticket)
        try:
            if ticket.prefill is not None:
                await leg.handed_over()
                reply.note(ticket, job.caller.sees_decisions)
            failure = await self._sent(job, tries, reply, held, leg)
            if failure is not None and failure.reason == UNPREFILLED:
                reply.note(ticket, job.caller.sees_decisions)
                failure = await self._sent(job, tries, reply, held, NO_LEG)
            return failure
        finally:
            leg.end()
            self._ended(ticket)

    async def _sent(
        self, job: Job, tries: Tries, reply: Reply, held: HeldBytes, leg: PrefillLeg | NoLeg
    ) -> Failure | None:
        """Sends it, with what a prefill leg gives."""
        ticket = tries.ticket
        answer: Answer | None = None
        try:
            if (kept := await self._kept_back(job, tries, leg.given)) is not None:
                return kept
            with (
                self._deadlines.within(self._first_byte_s if job.stream else None, reply.task) as limit,
                self._waiting(job, tries, limit) as waiting,
                self._hedges.watch(job, tries, waiting, self._second_failed) as hedge,
            ):
                leg.waits(waiting)
                answer = await self._send(job, ticket, leg.given)
                if answer.status in RETRIED_STATUSES:
                    return self._noted(ticket, of_prefill(ticket, await declined(answer, held)))
                streamed = answer.status == 200 and answer.is_event_stream
                if not streamed:
                    ticket.answered_s = time.monotonic()
                is_whole = await (begun(job, answer, held) if streamed else gathered(answer, held))
                said = begins(job, answer) if streamed else says(job, answer, is_whole)
                if said.unfinished is not None and (failure := failure_of(said.unfinished, job)) is not None:
                    self._refuse_replay(job, ticket, answer, failure.reason)
                    return self._doubted(ticket, of_prefill(ticket, failure))
                if answer.status >= 400 and (failure := await self._refused(job, tries, answer, is_whole, held)):
                    return failure
                hedge.answered(streamed)
                leg.taken()
            self._taken(job, tries, answer, streamed, reply)
            if is_whole and not streamed:
                await self._relay.whole(job, ticket, reply, answer, said.document)
            else:
                await self._relayed(job, tries, reply, answer, held, said if streamed else None)
            return None
        except UpstreamError as error:
            return self._broke(job, ticket, answer, error)
        except TimeoutError:
            return self._timed_out(ticket, waiting)
        finally:
            if answer is not None:
                answer.close()

    def _send(self, job: Job, ticket: Ticket, given: Mapping[str, Any]) -> Coroutine[Any, Any, Answer]:
        """Sends the request to its replica: await it. It is no coroutine: see Gateway.answer."""
        ticket.sent_s = time.monotonic()
        body, headers = self._outgoing.body(job, ticket, given), self._outgoing.headers(job, ticket)
        target, is_sent_once = self._outgoing.target(job, ticket), job.has_effects or bool(given)
        return self._upstream.send(job.method, ticket.url, target, headers, body, is_sent_once)

    def _timed_out(self, ticket: Ticket, waiting: WaitingAttempt) -> Failure:
        """Its limit is over, or it was moved."""
        if waiting.move_reason in (HEDGED, UNPREFILLED):
            return Failure(waiting.move_reason)
        return self._doubted(ticket, Failure(waiting.move_reason or "timeout", is_stall=waiting.is_stall))

    async def _kept_back(self, job: Job, tries: Tries, given: Mapping[str, Any]) -> Failure | None:
        """Why the request is not sent to the replica where it was placed."""
        ticket = tries.ticket
        if self._outgoing.lacks_prefill(job, ticket, given):
            if ticket.prefill is not None and ticket.prefill.failure == SWITCHED:
                return Failure(SWITCHED)  # a new placement finds another one to compute its prompt
            job.route.pairs_no_more()
            return Failure(NO_PREFILL)
        # Of a replica that is silent before it has this request, the request is not the reason.
        if tries.has_stalled and not await self._moves.answers(ticket.replica):
            return self._doubted(ticket, Failure("unreachable"))
        return None

    async def _refused(self, job: Job, tries: Tries, answer: Answer, is_whole: bool, held: HeldBytes) -> Failure | None:
        """The failure, if the replica refuses what another one may serve."""
        if self._outgoing.has_switched(job, tries.ticket, answer.status, answer.look() if is_whole else b""):
            return Failure(SWITCHED)
        return await declined(answer, held) if self._elsewhere.is_refused_here(job, tries, answer, is_whole) else None

    async def _answered_by_second(
        self, job: Job, tries: Tries, reply: Reply, second: Second, failure: Failure
    ) -> Failure | None:
        """This failure has ended the first attempt. A second one has begun before it, or still waits. None if the
        client was answered."""
        reply.trace.failed(failure.reason)
        first, ticket = tries.ticket, second.ticket
        self.failed(tries, failure)
        tries.follow(first, ticket)
        reply.note(ticket, job.caller.sees_decisions)
        job.route.traced(reply.trace.attempting(ticket))
        try:
            if (failed := await self._fails(job, tries, reply, second)) is not None:
                tries.second = second  # until the request ends: what it holds may be passed on
                return failed
            assert second.answer is not None
            self._taken(job, tries, second.answer, True, reply)
            await self._relayed(job, tries, reply, second.answer, second.held, Said(plain_bytes=second.plain_bytes))
            return None
        finally:
            if second.failure is None:
                second.end()
            self._ended(ticket)

    async def _fails(self, job: Job, tries: Tries, reply: Reply, second: Second) -> Failure | None:
        """Waits until a second attempt has begun, or failed."""
        try:
            with (
                self._deadlines.within(self._first_byte_s, reply.task) as limit,
                self._waiting(job, tries, limit) as waiting,
            ):
                await second.waiting
        except TimeoutError:
            failure = Failure(waiting.move_reason or "timeout", is_stall=waiting.is_stall)
            second.failed(self._doubted(second.ticket, failure))
        return second.failure

    def _second_failed(self, tries: Tries, second: Second, failure: Failure) -> None:
        """Counts the failure of a second attempt, unless the replica only refuses what another one may take. If the
        first one still waits, the second one is one of those that failed before."""
        if failure.status and not failure.is_server_error:
            return
        self._doubted(second.ticket, failure)
        if tries.ticket is not second.ticket:
            tries.failed_beside(second.ticket, failure)

    def _ended(self, ticket: Ticket) -> None:
        """However the attempt ended."""
        if ticket.shows_usage:
            self._fleet.learn_usage(ticket.replica, ticket.forces_usage)
        ticket.ended()

    def _broke(self, job: Job, ticket: Ticket, answer: Answer | None, error: UpstreamError) -> Failure:
        """The failure of an attempt without an answer. Raises ApiError if no other replica could do better."""
        if error.reason == "head_too_large":  # another replica would say the same
            raise _head_too_large(error) from error
        self._refuse_replay(job, ticket, answer, error.reason)
        return self._doubted(ticket, Failure(error.reason))

    def _waiting(
        self, job: Job, tries: Tries, limit: Limit, can_go_on: Callable[[], bool] | None = None
    ) -> WaitingAttempt:
        others, may_leave = self._elsewhere.others(job, tries), not job.has_effects
        replica, tickets = tries.ticket.replica, tries.tickets
        size_bytes = len(job.body)
        return self._moves.attempt(replica, others, tickets, limit, may_leave, tries.has_stalled, size_bytes, can_go_on)

    def _taken(self, job: Job, tries: Tries, answer: Answer, streamed: bool, reply: Reply) -> None:
        """The replica answers the request. Raises StreamBroken if it does not give the rest of a stream."""
        if tries.seam is not None and not streamed:
            tries.seam.why_lost = "refused"  # by all replicas alike
            raise StreamBroken(f"status_{answer.status}", by_replica=False)
        if tries.seam is not None:
            self._resumptions.settle(reply, tries.seam.how)
        is_served, ticket = answer.status < 400, tries.ticket
        if is_served and ticket.prefill is not None and ticket.prefill.failure.startswith("status_5"):
            self._failures.failed(ticket.prefill)  # it failed at a request that this replica serves
        if is_served and not streamed and job.endpoint.computes_prompt:
            ticket.computed()
        if is_served and job.images and (member := self._fleet.members.get(ticket.replica)):
            member.takes_media = True
        reply.trace.answered()
        self._failures.succeeded(ticket, is_served and job.method == "POST")
        if tries.failures:
            self._learn_from(job, tries, answer)

    def _learn_from(self, job: Job, tries: Tries, answer: Answer) -> None:
        """The request was answered after these failures. If it was served after a refusal of its media, the replicas
        that refused it take none."""
        self.count(tries, was_answered=True)
        if answer.status < 400 and job.route.refusing and any(map(is_refusal, tries.failures)):
            self._fleet.note_media_refusal(job.route.refusing)
        tries.failures.clear()  # their bodies are not needed any more

    def _refuse_replay(self, job: Job, ticket: Ticket, answer: Answer | None, reason: str) -> None:
        """Raises ApiError if a stream ended at once that was to send the events of a stored response once more. vLLM
        begins such a stream for every response, and breaks it off if that has no events. Then this is no fault of the
        replica; whether it lives is checked all the same."""
        is_replay = job.method == "GET" and answer is not None and answer.status == 200 and answer.is_event_stream
        if is_replay and reason in ("reset", "empty"):
            self._fleet.recheck(ticket.replica)
            message = (
                "stream: no events came for this response. Only one that was made with `background` and `stream` has "
                "any; retrieve this one without `stream`."
            )
            raise ApiError(400, "no_events", message, "stream")

    async def _relayed(
        self, job: Job, tries: Tries, reply: Reply, answer: Answer, held: HeldBytes, said: Said | None
    ) -> None:
        """Passes on a large answer, or a stream that has begun, and has `said` so much. Raises StreamBroken."""
        ticket = tries.ticket
        try:
            if said is None:
                await self._relay.large(job, ticket, reply, answer, held)
            else:
                self._resumptions.begin(job, tries)
                try:
                    with self._watched(job, tries, reply):
                        await self._relay.stream(job, tries, reply, answer, held, said.plain_bytes)
                finally:
                    self._resumptions.count(job, tries)
            self._failures.ended_well(ticket)
        except StreamBroken as broken:
            self._charges.untold(job, ticket, by_time=said is None)  # unless the stream goes on elsewhere
            if broken.by_replica:
                self._failures.broke_off(ticket)
                self._fleet.recheck(ticket.replica)
            raise

    @contextmanager
    def _watched(self, job: Job, tries: Tries, reply: Reply) -> Iterator[None]:
        """A stream that could go on elsewhere leaves a replica that falls silent and counts as gone."""
        if tries.sent is None and tries.seam is None:
            yield
            return
        waiting: WaitingAttempt | None = None
        asked = reply.job or job  # by the client
        try:
            with (
                self._deadlines.within(None, reply.task) as limit,
                self._waiting(job, tries, limit, partial(self._resumptions.may_go_on, asked, tries)) as waiting,
            ):
                yield
        except TimeoutError as error:
            why = waiting.move_reason if waiting else "timeout"
            raise StreamBroken(why, by_replica=why not in (DRAINED, ASLEEP)) from error

    def _doubted(self, ticket: Ticket, failure: Failure) -> Failure:
        """Marks a replica that may have died. Without an answer the fault is the replica's, so its breaker counts it.
        But a replica that sleeps is well, one that only this gateway cannot reach stays in use for others, and one that
        is dead is out of use already: it may only be busy."""
        self._noted(ticket, failure)
        if failure.is_silence:
            self._failures.failed(ticket)
        self._fleet.recheck(ticket.replica)
        return failure

    def _noted(self, ticket: Ticket, failure: Failure) -> Failure:
        """Whether an error is the replica's fault, a comparison with another replica tells later."""
        if failure.is_error:
            self._failures.erred(ticket)
        return failure


def of_prefill(ticket: Ticket, failure: Failure) -> Failure:
    """If another replica has computed the prompt, this one may only have failed to get that."""
    return replace(failure, is_of_prefill=True) if ticket.is_prefilled and failure.is_server_error else failure


def _head_too_large(error: UpstreamError) -> ApiError:
    message = f"The replica answered with {error.detail}. Ask for less at a time, or for another encoding_format."
    # Without this header, OpenAI's and Anthropic's SDKs send a request again after a 502.
    return ApiError(502, "answer_head_too_large", message, headers={"x-should-retry": "false"})
