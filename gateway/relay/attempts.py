"""The attempts of one request: place it, try a replica, then another one, another model, or the rest of a stream."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from coordinator.placement import NOTHING
from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.attempt import Attempt
from gateway.relay.charges import Charges
from gateway.relay.elsewhere import Elsewhere
from gateway.relay.held import HeldBytes
from gateway.relay.progress import NotResumable
from gateway.relay.relay import StreamBroken
from gateway.relay.reply import Reply
from gateway.relay.resumptions import Resumptions
from gateway.relay.retries import (
    NO_PREFILL,
    has_stalled_two,
    maybe_executed,
    prompt_stalls_replicas,
)
from gateway.relay.tries import Tries
from gateway.replicas.fleet import Fleet
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.request.keyring import Keyring
from gateway.request.reader import no_replica
from gateway.routing.fallbacks import Fallbacks
from gateway.routing.router import NO_ROOM_IN_TIME, Router
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings

NO_REPLICA = "no_replica"
_HELD_AGAIN_S = 1.0
"""How often a request that is held is tried again, if no news of the replicas comes: as often as they are checked."""
_HELD_ROUNDS = 5
"""By then all gateways know that the replicas are dead, and it is held without being tried."""
_NOT_KEPT_ALIVE = nullcontext()


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
        elsewhere: Elsewhere,
        fallbacks: Fallbacks,
        attempt: Attempt,
        resumptions: Resumptions,
        charges: Charges,
        metrics: Metrics,
        deadlines: Deadlines,
    ) -> None:
        self._keyring, self._admission, self._fleet = keyring, admission, fleet
        self._router, self._elsewhere, self._fallbacks = router, elsewhere, fallbacks
        self._attempt, self._resumptions, self._charges = attempt, resumptions, charges
        self._metrics, self._deadlines = metrics, deadlines
        self.use(settings)

    def use(self, settings: GatewaySettings) -> None:
        """Attempts that begin from now on have these timeouts."""
        self._attempt.use(settings.timeouts)
        self._request_s, self._keep_alive_s = settings.timeouts.request_s, settings.queue.keep_alive_s

    async def run(self, job: Job, reply: Reply) -> None:
        """Answers the client. Raises ApiError if no replica could, or if a stream broke after it began."""
        try:
            with self._deadlines.within(request_s := self._request_s, reply.task):
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
                    self._attempt.count(tries, was_answered=False)
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
            if ticket is None:
                return False
            self._refuse_revoked(job, ticket)
            reply.note(ticket, job.caller.sees_decisions)
            job.route.traced(reply.trace.attempting(ticket))
            failure = await self._attempt.run(job, tries, reply, held)
            if failure is None:
                return True
            if ticket.is_prefilled:  # whatever it was, the next one does without
                job.route.pairs_no_more()
            reply.trace.failed(failure.reason)
            self._attempt.failed(tries, failure)
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
        avoided_now, is_new = partial(self._elsewhere.avoided, job, tries), not tries.tickets
        with reply.kept_alive(self._keep_alive_s) if self._keep_alive_s and job.stream else _NOT_KEPT_ALIVE:
            ticket = await self._router.place(job, tries.replicas, avoided_now, tries.last, is_new=is_new)
            while ticket is None and tries.tickets and await self._is_held(job, tries):
                ticket = await self._router.place(job, (), avoided_now, tries.last, is_new=False)
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
            only_prefills = self._fleet.has_only_prefills(job.route.backends)
            are_asleep = any(self._fleet.is_asleep(replica) for replica in could_serve)
            raise no_replica(are_asleep=are_asleep, only_prefills=only_prefills)
        if (reason := failures[-1].reason) == NO_PREFILL:
            message = "Its replicas only decode, and none computes the prompt for them."
            raise ApiError(503, NO_REPLICA, message, headers={"retry-after": "1"})
        raise ApiError(502, "replica_unreachable", f"No replica answered ({reason}).", headers={"retry-after": "1"})
