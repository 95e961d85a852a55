"""The attempts of one request: place it, send it, and relay the answer or try another replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from coordinator.placement import NOTHING
from coordinator.registry import ASLEEP
from gateway.deadlines import Deadlines, Limit
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.beginnings import Said, begins, begun, declined, failure_of, gathered, says
from gateway.relay.charges import Charges
from gateway.relay.elsewhere import Elsewhere
from gateway.relay.hedges import HEDGED, Hedges
from gateway.relay.held import HeldBytes
from gateway.relay.moves import Moves, WaitingAttempt
from gateway.relay.outgoing import Outgoing
from gateway.relay.prefill_legs import PrefillLegs
from gateway.relay.progress import NotResumable
from gateway.relay.relay import Relay, StreamBroken
from gateway.relay.reply import Reply
from gateway.relay.resumptions import Resumptions
from gateway.relay.retries import (
    DRAINED,
    RETRIED_STATUSES,
    Failure,
    has_stalled_two,
    held_against_replicas,
    is_refusal,
    maybe_executed,
    prompt_stalls_replicas,
)
from gateway.relay.second import Second
from gateway.relay.tries import Tries
from gateway.replicas.fleet import Fleet
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.request.keyring import Keyring
from gateway.request.reader import no_replica
from gateway.routing.failures import ReplicaFailures
from gateway.routing.fallbacks import Fallbacks
from gateway.routing.router import NO_ROOM_IN_TIME, Router
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings
from gateway.upstream import Answer, Upstream, UpstreamError

NO_REPLICA = "no_replica"
_HELD_AGAIN_S = 1.0
"""How often a request that is held is tried again, if no news of the replicas comes: as often as they are checked."""
_HELD_ROUNDS = 5
"""By then all gateways know that the replicas are dead, and it is held without being tried."""


class Attempts:
    """Runs the attempts of a request until a replica answers."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        keyring: Keyring,
        admission: Admission,
        fleet: Fleet,
        router: Router,
        failures: ReplicaFailures,
        outgoing: Outgoing,
        upstream: Upstream,
        moves: Moves,
        elsewhere: Elsewhere,
        relay: Relay,
        charges: Charges,
        fallbacks: Fallbacks,
        resumptions: Resumptions,
        hedges: Hedges,
        prefill_legs: PrefillLegs,
        metrics: Metrics,
    ) -> None:
        self._hedges = hedges
        self._prefill_legs = prefill_legs
        self._resumptions = resumptions
        self._fallbacks = fallbacks
        self.use(settings)
        self._deadlines = Deadlines()
        self._keyring = keyring
        self._admission = admission
        self._fleet = fleet
        self._router = router
        self._failures = failures
        self._outgoing = outgoing
        self._upstream = upstream
        self._moves = moves
        self._elsewhere = elsewhere
        self._relay = relay
        self._charges = charges
        self._metrics = metrics

    def use(self, settings: GatewaySettings) -> None:
        """Attempts that begin from now on have these timeouts."""
        self._timeouts = settings.timeouts
        self._keep_alive_s = settings.queue.keep_alive_s

    async def run(self, job: Job, reply: Reply) -> None:
        """Answers the client. Raises ApiError if no replica could, or if a stream broke after it began."""
        try:
            with self._deadlines.within(request_s := self._timeouts.request_s, reply.task):
                await self._run(job, reply)
        except TimeoutError:
            raise ApiError(504, "deadline_exceeded", f"No complete answer within {request_s:g} s.") from None

    async def _run(self, job: Job, reply: Reply) -> None:
        self._elsewhere.note_request()
        tries = Tries()
        reply.job, reply.tickets = job, tries.tickets
        held = HeldBytes(self._admission)
        try:
            if self._fallbacks.is_due(job):
                self._fall_back(job, tries, reply, NO_REPLICA)
            now: Job | None = job
            while now is not None:
                now = await self._is_over(job, now, tries, reply, held)
        except ApiError as error:
            reply.trace.failed(error.code)
            raise
        finally:
            held.let_go()
            self._resumptions.settle(reply, "none", "its request ended", "ended")
            if reply.tickets:
                self._charge(job, reply.tickets[-1], tries)
            tries.done()

    def _charge(self, job: Job, ticket: Ticket, tries: Tries) -> None:
        """The last ticket pays for what its client has got, if no answer has told. An attempt that failed pays nothing,
        unless it was for the rest of a stream."""
        if tries.seam is not None and ticket.used is NOTHING:
            ticket.used = None
        if ticket.used is None:
            self._charges.untold(job, ticket)

    async def _is_over(self, job: Job, now: Job, tries: Tries, reply: Reply, held: HeldBytes) -> Job | None:
        """Tries `now`: the request, or the one for the rest of its stream. Returns the next one for the rest, if its
        stream breaks; None if the client has got all."""
        try:
            while not await self._is_answered(now, tries, reply, held):
                if not self._elsewhere.is_uncompared(now, tries):
                    self._count(tries, was_answered=False)
                if not self._fall_back(now, tries, reply, "failed" if tries.failures else NO_REPLICA):
                    self._give_up(now, tries, reply)
                    return None
            return None
        except StreamBroken as broken:
            return await self._goes_on(job, tries, reply, broken)
        except ApiError as error:
            if tries.seam is None or tries.seam.times == 0:
                raise
            why_not = f"no other replica could: {error.code}"
            self._resumptions.settle(reply, "none", why_not, error.code)
            raise self._broken(reply.resumed[-1]["why"], why_not) from error

    async def _goes_on(self, job: Job, tries: Tries, reply: Reply, broken: StreamBroken) -> Job | None:
        """The request for the rest of a stream. None if only its end is missing, which is sent. Raises ApiError."""
        why = broken.reason.partition(":")[0]
        reply.broke_off(tries.ticket.replica, why)
        try:
            rest = await self._resumptions.next(job, tries, reply)
        except NotResumable as error:
            raise self._broken(broken.reason, f"not resumable: {error.reason}") from broken
        reply.trace.failed(why)
        if rest is None and tries.seam is not None:
            reply.end(tries.seam.close())
        return rest

    def _broken(self, reason: str, why: str) -> ApiError:
        """`reason`: why it broke off; `why`: why it did not go on."""
        self._metrics.broken_streams.inc()
        message = f"The replica broke off this answer ({reason}); it is incomplete, and did not go on ({why})."
        return ApiError(502, "stream_broken", message)

    async def _is_answered(self, job: Job, tries: Tries, reply: Reply, held: HeldBytes) -> bool:
        """Tries the replicas of its model. False if no replica is left, and nobody has answered."""
        while not tries.failures or self._elsewhere.is_next(job, tries) or await self._is_untold(job, tries):
            try:
                ticket = await self._place_alive(job, tries, reply)
            except ApiError as error:
                if error.code != NO_ROOM_IN_TIME or not self._fall_back(job, tries, reply, "no_room"):
                    raise
                continue
            if ticket is None and tries.tickets and await self._is_held(job, tries):
                continue
            if ticket is None:
                return False
            self._refuse_revoked(job, ticket)
            reply.note(ticket, job.caller.sees_decisions)
            job.route.traced(reply.trace.attempting(ticket))
            failure = await self._attempt(job, tries, reply, held)
            if failure is not None and (second := tries.second) is not None and second.failure is None:
                failure = await self._answered_by_second(job, tries, reply, second, failure)
            if failure is None:
                return True
            if ticket.is_prefilled:  # whatever it was, the next one does without
                job.route.pairs_no_more()
            reply.trace.failed(failure.reason)
            self._failed(tries, failure)
        return False

    def _fall_back(self, job: Job, tries: Tries, reply: Reply, why: str) -> bool:
        """Lets another model answer, if the configuration allows it. Not once a client has begun to read: its headers
        tell which model answers. A request that stalls replicas, or may have been executed, is sent nowhere else."""
        if not job.route.fallbacks or reply.has_started or not self._elsewhere.may_fall_back(job, tries):
            return False
        if not self._fallbacks.next(job):
            return False
        tries.begin_again()
        self._metrics.fallbacks.inc(why)
        return True

    async def _place_alive(self, job: Job, tries: Tries, reply: Reply) -> Ticket | None:
        """The next attempt's place. Meanwhile a stream's client hears that it still waits, if that is wanted."""
        reply.trace.placing()
        avoided_now = partial(self._elsewhere.avoided, job, tries)
        if self._keep_alive_s and job.stream:
            with reply.kept_alive(self._keep_alive_s):
                ticket = await self._router.place(job, tries.replicas, avoided_now, tries.last)
        else:
            ticket = await self._router.place(job, tries.replicas, avoided_now, tries.last)
        if ticket is not None:
            if tries.failures:
                self._metrics.retries.inc(tries.failures[-1].reason)
            ticket.other_name = job.other_name
            tries.last = ticket
            tries.tickets.append(ticket)
            reply.tickets = tries.tickets
            if tries.seam is not None:
                ticket.seen_tokens = tries.seam.seen_tokens
        return ticket

    def _refuse_revoked(self, job: Job, ticket: Ticket) -> None:
        """Raises ApiError if its key was revoked while it waited."""
        try:
            self._keyring.refuse_revoked(job.caller)
        except ApiError:
            ticket.used = NOTHING
            ticket.ended()
            raise

    async def _is_untold(self, job: Job, tries: Tries) -> bool:
        """Whether it is held after all its replicas were tried."""
        return set(tries.replicas).issuperset(job.route.could_serve()) and await self._is_held(job, tries)

    async def _is_held(self, job: Job, tries: Tries) -> bool:
        """Nobody has heard of the request: every replica refused the connection, so all have died just now. If it may
        be held, it waits until one is back, and is tried as if it were new. A gateway that cannot reach replicas which
        live for others gives up after some rounds."""
        is_refused = all(failure.reason == "refused" for failure in tries.failures)
        if not is_refused or tries.rounds >= _HELD_ROUNDS or not await self._router.is_held(job, _HELD_AGAIN_S):
            return False
        tries.begin_again()
        return True

    def _failed(self, tries: Tries, failure: Failure) -> None:
        """An attempt has failed."""
        tries.ticket.used = NOTHING
        if failure.reason in (ASLEEP, HEDGED):
            if failure.reason == ASLEEP:
                self._metrics.retries.inc(ASLEEP)
            tries.tickets.pop()  # it has done nothing: the request is placed as if it had not been there
            return
        tries.ticket.failure = failure.reason
        tries.failures.append(failure)

    def _count(self, tries: Tries, *, was_answered: bool) -> None:
        """Counts server errors against their replicas, unless they are the request's own fault."""
        for index in held_against_replicas(tries.failures, was_answered):
            self._failures.failed(tries.tickets[index])

    def _give_up(self, job: Job, tries: Tries, reply: Reply) -> None:
        """Passes on the last error that a replica answered to its client's request. If none answered, or this is the
        rest of a stream, raises a 503 or 502."""
        failures = tries.failures
        if has_stalled_two(failures):
            raise prompt_stalls_replicas()
        if job.has_effects and (unsure := maybe_executed(failures)) is not None:
            raise unsure
        for ticket, failure in reversed(list(zip(tries.tickets, failures, strict=True))):
            if tries.seam is None and failure.status and failure.body is not None:
                reply.note(ticket, job.caller.sees_decisions)
                reply.whole(failure.status, failure.headers, failure.body)
                return
        could_serve = job.route.could_serve()
        if not failures or not any(self._fleet.is_ready(replica) for replica in could_serve):
            raise no_replica(are_asleep=any(self._fleet.is_asleep(replica) for replica in could_serve))
        reason = failures[-1].reason
        raise ApiError(502, "replica_unreachable", f"No replica answered ({reason}).", headers={"retry-after": "1"})

    async def _attempt(self, job: Job, tries: Tries, reply: Reply, held: HeldBytes) -> Failure | None:
        """One attempt, with the last ticket. None if the client was answered, whatever the answer was."""
        ticket = tries.ticket
        answer: Answer | None = None
        try:
            given = await self._prefill_legs.given(job, ticket, held, reply.task)
            if ticket.is_prefilled:
                reply.note(ticket, job.caller.sees_decisions)
            # Of a replica that is silent before it has this request, the request is not the reason.
            if tries.has_stalled and not await self._moves.answers(ticket.replica):
                return self._doubted(ticket, Failure("unreachable"))
            with (
                self._deadlines.within(self._timeouts.first_byte_s if job.stream else None, reply.task) as limit,
                self._waiting(job, tries, limit) as waiting,
                self._hedges.watch(job, tries, waiting, self._second_failed) as hedge,
            ):
                ticket.sent_s = time.monotonic()
                body, headers = self._outgoing.body(job, ticket, given), self._outgoing.headers(job, ticket)
                target, is_sent_once = self._outgoing.target(job, ticket), job.has_effects or bool(given)
                answer = await self._upstream.send(job.method, ticket.url, target, headers, body, is_sent_once)
                if answer.status in RETRIED_STATUSES:
                    return self._noted(ticket, _of_prefill(ticket, await declined(answer, held)))
                streamed = answer.status == 200 and answer.is_event_stream
                if not streamed:
                    ticket.answered_s = time.monotonic()
                is_whole = await (begun(job, answer, held) if streamed else gathered(answer, held))
                said = begins(job, answer) if streamed else says(job, answer, is_whole)
                if said.unfinished is not None and (failure := failure_of(said.unfinished, job)) is not None:
                    self._refuse_replay(job, ticket, answer, failure.reason)
                    return self._doubted(ticket, _of_prefill(ticket, failure))
                if answer.status >= 400 and self._elsewhere.is_refused_here(job, tries, answer, is_whole):
                    return await declined(answer, held)
                hedge.answered(streamed)
            self._taken(job, tries, answer, streamed, reply)
            if is_whole and not streamed:
                await self._relay.whole(job, ticket, reply, answer, said.document)
            else:
                await self._relayed(job, tries, reply, answer, held, said if streamed else None)
            return None
        except UpstreamError as error:
            return self._broke(job, ticket, answer, error)
        except TimeoutError:
            if waiting.move_reason == HEDGED:
                return Failure(HEDGED)
            return self._doubted(ticket, Failure(waiting.move_reason or "timeout", is_stall=waiting.is_stall))
        finally:
            if answer is not None:
                answer.close()
            self._ended(ticket)

    async def _answered_by_second(
        self, job: Job, tries: Tries, reply: Reply, second: Second, failure: Failure
    ) -> Failure | None:
        """This failure has ended the first attempt. A second one has begun before it, or still waits. None if the
        client was answered."""
        reply.trace.failed(failure.reason)
        first, ticket = tries.ticket, second.ticket
        self._failed(tries, failure)
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
                self._deadlines.within(self._timeouts.first_byte_s, reply.task) as limit,
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
        self._count(tries, was_answered=True)
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


def _of_prefill(ticket: Ticket, failure: Failure) -> Failure:
    """If another replica has computed the prompt, this one may only have failed to get that."""
    return replace(failure, is_of_prefill=True) if ticket.is_prefilled and failure.is_server_error else failure


def _head_too_large(error: UpstreamError) -> ApiError:
    message = f"The replica answered with {error.detail}. Ask for less at a time, or for another encoding_format."
    # Without this header, OpenAI's and Anthropic's SDKs send a request again after a 502.
    return ApiError(502, "answer_head_too_large", message, headers={"x-should-retry": "false"})
