"""The attempts of one request: place it, send it, and relay the answer or try another replica."""

from __future__ import annotations

import time
from collections.abc import Collection, Coroutine, Sequence
from math import inf
from typing import Any, NamedTuple

import orjson

from coordinator.registry import ASLEEP
from coordinator.scripts import NOTHING
from gateway.deadlines import Deadlines, Limit
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.charges import Charges
from gateway.relay.endings import (
    ABORTED,
    Unfinished,
    may_be_unfinished,
    may_open,
    opens,
    unfinished,
    whole_may_be_unfinished,
)
from gateway.relay.error_shapes import error_body
from gateway.relay.events import event_data, read_event, split_events
from gateway.relay.held import HeldBytes
from gateway.relay.moves import Moves, WaitingAttempt
from gateway.relay.own_refusals import NOT_FOUND, REFUSALS, own_refusal
from gateway.relay.relay import MAX_GATHERED_BYTES, MAX_READ_BYTES, Relay, StreamBroken, json_object
from gateway.relay.reply import Reply, passed_headers
from gateway.relay.retries import (
    RETRIED_STATUSES,
    Failure,
    ends_attempts,
    has_stalled_two,
    held_against_replicas,
    is_refusal,
    maybe_executed,
    prompt_stalls_replicas,
)
from gateway.relay.retry_budget import RetryBudget
from gateway.relay.token_ids import ASK, asked_token_ids
from gateway.replicas.fleet import Fleet
from gateway.request.admission import Admission
from gateway.request.reader import Job, no_replica
from gateway.request.reading.document import with_fields
from gateway.routing.holds import Holds
from gateway.routing.router import Router
from gateway.routing.tenants import Tenants
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings
from gateway.upstream import Answer, Buffer, Upstream, UpstreamError
from gateway.upstream.excerpts import WINDOW_BYTES

_EMPTY = Unfinished("empty")
_JSON = ((b"content-type", b"application/json"),)


class Attempts:
    """Runs the attempts of a request until a replica answers."""

    def __init__(
        self,
        settings: GatewaySettings,
        router: Router,
        fleet: Fleet,
        upstream: Upstream,
        relay: Relay,
        metrics: Metrics,
        admission: Admission,
        moves: Moves,
        holds: Holds,
        tenants: Tenants,
        charges: Charges,
    ) -> None:
        self._charges = charges
        self._moves = moves
        self._holds = holds
        self._tenants = tenants
        self._admission = admission
        self._timeouts = settings.timeouts
        self._max_attempts = settings.retries.max_attempts
        self._keep_alive_s = settings.queue.keep_alive_s
        self._budget = RetryBudget(settings.retries)
        self._dp_ranks = {r.id: r.dp_rank for r in settings.replicas if r.dp_rank is not None}
        self._deadlines = Deadlines()
        self._router = router
        self._fleet = fleet
        self._upstream = upstream
        self._relay = relay
        self._metrics = metrics

    async def run(self, job: Job, reply: Reply) -> None:
        """Answers the client. Raises ApiError if no replica could, or if a stream broke after it began."""
        try:
            with self._deadlines.within(self._timeouts.request_s, reply.task):
                await self._run(job, reply)
        except TimeoutError:
            raise ApiError(
                504, "deadline_exceeded", f"No complete answer within {self._timeouts.request_s:g} s."
            ) from None

    async def _run(self, job: Job, reply: Reply) -> None:
        self._budget.note_request(time.monotonic())
        tickets: list[Ticket] = []
        last: Ticket | None = None
        reply.job, reply.tickets = job, tickets
        job.is_traced = reply.trace.is_traced
        failures: list[Failure] = []
        held = HeldBytes(self._admission)
        try:
            while not failures or self._tries_elsewhere(job, tickets, failures):
                reply.trace.placing()
                if self._keep_alive_s and job.stream:
                    with reply.kept_alive(self._keep_alive_s):
                        ticket = await self._place(job, tickets, last)
                else:
                    ticket = await self._place(job, tickets, last)
                if ticket is None:
                    break
                last = ticket
                if failures:
                    self._metrics.retries.inc(failures[-1].reason)
                tickets.append(ticket)
                reply.note(ticket, job.caller.sees_decisions)
                reply.trace.attempting(ticket, job.headers)
                failure = await self._attempt(job, tickets, failures, reply, held)
                if failure is None:
                    return
                reply.trace.failed(failure.reason)
                self._failed(ticket, failure)
                if failure.reason != ASLEEP:
                    failures.append(failure)
                    continue
                self._metrics.retries.inc(ASLEEP)
                tickets.pop()  # the replica has done nothing: the request is placed as if it had not been there
        except ApiError as error:
            reply.trace.failed(error.code)
            raise
        finally:
            held.let_go()
            if tickets and tickets[-1].used is None:
                self._charges.untold(job, tickets[-1])
            for each in tickets:
                each.done()
            if last is not None and last not in tickets:
                last.done()
        if not self._is_uncompared(job, failures):
            self._count(tickets, failures, was_answered=False)
        self._give_up(job, tickets, failures, reply)

    async def _place(self, job: Job, tickets: list[Ticket], last: Ticket | None) -> Ticket | None:
        """The next attempt's place. It may have to wait for it. The `last` attempt gives back its load."""
        if not tickets:
            await self._holds.until_ready(job)
        while True:
            if job.has_choice:
                self._router.aim(job, [each.replica for each in tickets])
            ticket = await self._router.place(job, self._tried(job, tickets), last)
            if ticket is not None or tickets or not self._holds.may_hold(job):
                return ticket
            await self._holds.until_ready(job, was_refused=True)  # the last replica was drained or lost just now

    def _tries_elsewhere(self, job: Job, tickets: list[Ticket], failures: list[Failure]) -> bool:
        """Whether to ask another replica. Others may have come since the request was read."""
        job.renew(self._fleet.backends(job.model))
        tried = {each.replica for each in tickets}
        if (
            tried.issuperset(job.could_serve())
            or len(failures) >= self._max_attempts
            or ends_attempts(failures, job.has_effects)
        ):
            return False
        reason = failures[-1].reason
        if reason in ("refused", "unreachable", ABORTED) or is_refusal(failures[-1]):
            return True  # placements soon avoid such a replica, so these retries end by themselves
        replica = tickets[-1].replica
        if not self._fleet.is_ready(replica):
            return True
        if self._router.errs_in_a_row(replica) and self._has_sound_one(job, tried):
            return True  # it fails everybody: its breaker opens soon
        if self._budget.take(time.monotonic()):
            return True
        self._metrics.retries_withheld.inc()
        return False

    def _failed(self, ticket: Ticket, failure: Failure) -> None:
        """An attempt has failed. Whether by the replica's fault, a comparison with another replica tells later."""
        ticket.used = NOTHING
        if failure.is_error:
            self._router.erred(ticket.replica)

    def _has_sound_one(self, job: Job, tried: Collection[str]) -> bool:
        """Whether a ready replica is left that does not answer each request with an error. If all do, retries would
        only add to the load."""
        left = (name for name in job.could_serve() if name not in tried)
        return any(self._fleet.is_ready(name) and not self._router.errs_in_a_row(name) for name in left)

    def _tried(self, job: Job, tickets: Sequence[Ticket]) -> list[str]:
        """The replicas not to ask: those that were asked, and those that this gateway cannot reach."""
        lost = () if job.pinned else self._moves.unreachable(job.served.replicas, job.served.pool)
        return [*(each.replica for each in tickets), *lost]

    def _others(self, job: Job, failures: list[Failure]) -> Collection[str]:
        """The replicas that may be asked if this attempt fails. A request with effects stays where it is."""
        is_last = job.pinned or job.has_effects or len(failures) + 1 >= self._max_attempts
        return () if is_last else job.could_serve()

    def _is_uncompared(self, job: Job, failures: list[Failure]) -> bool:
        """Whether one replica failed and no other was asked, although there are others. Then the fault may be the
        request's own, so it does not count against the replica. Otherwise a client could open breakers with pinned
        requests, or by using up the retry budget."""
        return len(failures) == 1 and self._max_attempts > 1 and len(job.could_serve()) > 1

    def _count(self, tickets: list[Ticket], failures: list[Failure], *, was_answered: bool) -> None:
        """Counts server errors against their replicas, unless they are the request's own fault."""
        for index in held_against_replicas(failures, was_answered):
            self._router.failed(tickets[index])

    def _give_up(self, job: Job, tickets: list[Ticket], failures: list[Failure], reply: Reply) -> None:
        """Passes on the last error that a replica answered. If none answered, raises a 503 or 502."""
        if has_stalled_two(failures):
            raise prompt_stalls_replicas()
        if job.has_effects and (unsure := maybe_executed(failures)) is not None:
            raise unsure
        for ticket, failure in reversed(list(zip(tickets, failures, strict=True))):
            if failure.status and failure.body is not None:
                reply.note(ticket, job.caller.sees_decisions)
                reply.whole(failure.status, failure.headers, failure.body)
                return
        could_serve = job.could_serve()
        if not failures or not any(self._fleet.is_ready(replica) for replica in could_serve):
            raise no_replica(are_asleep=any(self._fleet.is_asleep(replica) for replica in could_serve))
        reason = failures[-1].reason
        raise ApiError(502, "replica_unreachable", f"No replica answered ({reason}).", headers={"retry-after": "1"})

    async def _attempt(
        self, job: Job, tickets: list[Ticket], failures: list[Failure], reply: Reply, held: HeldBytes
    ) -> Failure | None:
        """One attempt, with the last ticket. None if the client was answered, whatever the answer was."""
        ticket = tickets[-1]
        answer: Answer | None = None
        try:
            if failures and await self._is_silent_already(ticket, failures):
                return self._doubted(ticket, Failure("unreachable"))
            with (
                self._deadlines.within(self._timeouts.first_byte_s if job.stream else None, reply.task) as limit,
                self._waiting(job, tickets, failures, limit) as waiting,
            ):
                ticket.sent_s = time.monotonic()
                self._decide_usage(job, ticket)
                answer = await self._upstream.send(
                    job.method, ticket.url, job.target, self._headers(job, ticket), _body(job, ticket), job.has_effects
                )
                if answer.status in RETRIED_STATUSES:
                    return await _declined(answer, held)
                streamed = answer.status == 200 and answer.is_event_stream
                if not streamed:
                    ticket.answered_s = time.monotonic()
                is_whole = await (_begun(answer, held) if streamed else _gathered(answer, held))
            said = _begins(job, answer) if streamed else _says(job, answer, is_whole)
            if said.unfinished is not None and (failure := _failure(said.unfinished, job, reply)) is not None:
                self._refuse_replay(job, ticket, answer, failure.reason)
                return self._doubted(ticket, failure)
            if answer.status >= 400 and self._is_refused_here(job, tickets, failures, answer, is_whole):
                return await _declined(answer, held)
            if answer.status < 400:
                self._taken(job, ticket, streamed)
            reply.trace.answered()
            self._router.succeeded(ticket)
            if failures:
                self._learn_from(job, tickets, failures, answer)
            if is_whole and not streamed:
                await self._relay.whole(job, ticket, reply, answer, said.document)
            else:
                await self._relayed(job, ticket, reply, answer, held, said if streamed else None)
            self._router.ended_well(ticket)
            return None
        except UpstreamError as error:
            return self._broke(job, ticket, answer, error)
        except TimeoutError:
            return self._doubted(ticket, Failure(waiting.move_reason or "timeout", is_stall=waiting.is_stall))
        finally:
            if answer is not None:
                answer.close()
            self._ended(ticket)

    def _decide_usage(self, job: Job, ticket: Ticket) -> None:
        """Whether to ask for the usage of a stream whose client says nothing of it."""
        if job.is_usage_open:
            asks = self._fleet.asks_usage(ticket.replica)
            ticket.asks_usage, ticket.shows_usage = asks is True, asks is None

    def _ended(self, ticket: Ticket) -> None:
        """However the attempt ended."""
        if ticket.shows_usage:
            self._fleet.learn_usage(ticket.replica, ticket.forces_usage)
        if not ticket.is_computed:
            ticket.failed()

    def _broke(self, job: Job, ticket: Ticket, answer: Answer | None, error: UpstreamError) -> Failure:
        """The failure of an attempt without an answer. Raises ApiError if no other replica could do better."""
        if error.reason == "head_too_large":  # another replica would say the same
            raise _head_too_large(error) from error
        self._refuse_replay(job, ticket, answer, error.reason)
        return self._doubted(ticket, Failure(error.reason))

    def _waiting(self, job: Job, tickets: list[Ticket], failures: list[Failure], limit: Limit) -> WaitingAttempt:
        others = self._others(job, failures)
        has_stalled = bool(failures) and any(failure.is_stall for failure in failures)
        return self._moves.attempt(
            tickets[-1].replica, others, tickets, limit, not job.has_effects, has_stalled, len(job.body)
        )

    async def _is_silent_already(self, ticket: Ticket, failures: list[Failure]) -> bool:
        """Whether a replica is silent before it gets a request that may have stalled another one. Then this request is
        not what keeps it busy."""
        return any(failure.is_stall for failure in failures) and not await self._moves.answers(ticket.replica)

    def _is_refused_here(
        self, job: Job, tickets: list[Ticket], failures: list[Failure], answer: Answer, is_whole: bool
    ) -> bool:
        """Whether the replica refuses what another one may serve. The next attempt avoids all replicas that would
        refuse it for the same reason."""
        replica, served = tickets[-1].replica, job.served
        tried = {each.replica for each in tickets}
        if answer.status not in REFUSALS or not is_whole or job.pinned or len(tickets) >= self._max_attempts:
            return False
        if job.has_effects and answer.status != NOT_FOUND:  # it may have run tools before it said so
            return False
        if tried.issuperset(job.could_serve()):
            return False
        length = served.max_tokens.get(replica, 0)
        has_longer = length > 0 and answer.status != NOT_FOUND and self._has_longer(job, length, tried)
        has_media = job.prompt is not None and bool(job.prompt.images) and not any(map(is_refusal, failures))
        why = own_refusal(answer.status, answer.look(), job.model, has_longer=has_longer, has_media=has_media)
        if why == "media_refused" and self._fleet.takes_media(replica) and not self._budget.take(time.monotonic()):
            return False  # most likely every replica says so
        if why == "not_served":
            self._fleet.read_again(replica)
        elif why == "too_long":
            job.needed_tokens = max(job.needed_tokens, length + 1)
        elif why == "media_refused":
            job.refusing |= served.names if len(job.backends) > 1 else {replica}
        return bool(why)

    def _taken(self, job: Job, ticket: Ticket, streamed: bool) -> None:
        """The replica answers the request."""
        if not streamed and job.endpoint.computes_prompt:
            ticket.computed()
        if job.prompt is not None and job.prompt.images and (member := self._fleet.members.get(ticket.replica)):
            member.takes_media = True

    def _has_longer(self, job: Job, length_tokens: int, tried: Collection[str]) -> bool:
        """Whether a ready replica that was not tried takes a longer prompt."""
        return any(
            each.max_tokens.get(name, inf) > length_tokens and name not in tried and self._fleet.is_ready(name)
            for each in job.backends
            for name in each.replicas
        )

    def _learn_from(self, job: Job, tickets: list[Ticket], failures: list[Failure], answer: Answer) -> None:
        """The request was answered after these failures. If it was served after a refusal of its media, the replicas
        that refused it take none."""
        self._count(tickets, failures, was_answered=True)
        if answer.status < 400 and job.refusing and any(map(is_refusal, failures)):
            self._fleet.note_media_refusal(job.refusing)
        failures.clear()  # their bodies are not needed any more

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
        self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, held: HeldBytes, begun: _Said | None
    ) -> None:
        """Passes on a large answer, or a stream that has `begun`."""
        try:
            if begun is None:
                await self._relay.large(job, ticket, reply, answer, held)
            else:
                await self._relay.stream(job, ticket, reply, answer, held, begun.plain_bytes)
        except StreamBroken as broken:
            self._charges.untold(job, ticket, by_time=begun is None)
            if broken.by_replica:
                self._router.broke_off(ticket)
                self._fleet.recheck(ticket.replica)
            self._metrics.broken_streams.inc()
            message = f"The replica broke off this answer ({broken.reason}); it is incomplete."
            raise ApiError(502, "stream_broken", message) from broken

    def _headers(self, job: Job, ticket: Ticket) -> dict[str, str]:
        headers = {}
        if (rank := self._dp_ranks.get(ticket.replica)) is not None:
            member = self._fleet.members.get(ticket.replica)
            if (place := member.facts.place_of(rank) if member else rank) is not None:
                headers["x-data-parallel-rank"] = str(place)
        priority = self._tenants.engine_priority(job.caller.tenant) if job.endpoint.takes_priority else None
        if priority is not None:  # 0, too: a body may name another one
            headers["x-vllm-priority"] = str(priority)
        return {**job.headers, **headers} if headers else job.headers

    def _doubted(self, ticket: Ticket, failure: Failure) -> Failure:
        """Marks a replica that may have died. Without an answer the fault is the replica's, so its breaker counts it.
        But a replica that sleeps is well, one that only this gateway cannot reach stays in use for others, and one that
        is dead is out of use already: it may only be busy."""
        if not failure.status and failure.is_error:
            self._router.failed(ticket)
        self._fleet.recheck(ticket.replica)
        return failure


async def _declined(answer: Answer, held: HeldBytes) -> Failure:
    """The replica refused. The answer is kept, if there is room, and passed on only if no other replica can serve."""
    body = answer.take() if await _gathered(answer, held) else None
    held.keep()
    return Failure(f"status_{answer.status}", answer.status, tuple(passed_headers(answer)), body)


def _head_too_large(error: UpstreamError) -> ApiError:
    message = f"The replica answered with {error.detail}. Ask for less at a time, or for another encoding_format."
    # Without this header, OpenAI's and Anthropic's SDKs send a request again after a 502.
    return ApiError(502, "answer_head_too_large", message, headers={"x-should-retry": "false"})


def _body(job: Job, ticket: Ticket) -> Sequence[Buffer]:
    """The body for this replica. It gains fields if the replica's agent must learn which blocks the prompt uses."""
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}} if ticket.asks_usage else {}
    if ticket.placement is not None and not job.is_batch:
        if ticket.placement.report:
            asked["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        if asked_token_ids(job, ticket) is not None:
            asked |= ASK
    return with_fields(job.body, asked) if asked else (job.body,)


def _gathered(answer: Answer, held: HeldBytes) -> Coroutine[Any, Any, bool]:
    """Gathers an answer that is no stream of events. False if it is too large, if there is no room for it, or if it is
    to be passed on as it comes."""
    return answer.gathered(0 if answer.comes_in_pieces else MAX_GATHERED_BYTES, held.has_room)


async def _begun(answer: Answer, held: HeldBytes) -> bool:
    """Waits for the first events of a stream that do more than announce it. vLLM announces a chat or a message together
    with its first token, or with the news that it was aborted before. True if the stream is complete."""
    size_bytes = 0
    while not await answer.gathered(size_bytes, held.has_room):
        first = answer.look()
        if not size_bytes < len(first) <= WINDOW_BYTES or not all(map(_only_opens, reversed(split_events(first)))):
            return False
        size_bytes = len(first)
    return True


def _only_opens(event: bytes) -> bool:
    if not may_open(event) and b"data" in event:
        return False
    if not read_event(event).data:  # a comment
        return True
    return (document := event_data(event)) is not None and opens(document)


class _Said(NamedTuple):
    """What an answer says, as far as it was read."""

    document: dict[str, Any] | None = None
    """A whole answer's content."""
    unfinished: Unfinished | None = None
    """Why its engine did not finish it."""
    plain_bytes: int = 0
    """So many bytes at the beginning of a stream are known not to say that it is unfinished."""


_NOTHING = _Said()


def _says(job: Job, answer: Answer, is_whole: bool) -> _Said:
    """What a gathered answer says. A large one is parsed only if it may say that it is not finished."""
    if not is_whole or answer.status >= 400 or not job.endpoint.is_generated:
        return _NOTHING
    body = answer.look()
    if len(body) > MAX_READ_BYTES and not whole_may_be_unfinished(body, job.endpoint.api):
        return _NOTHING
    document = json_object(body)
    return _Said(document, unfinished(document))


def _begins(job: Job, answer: Answer) -> _Said:
    """What a stream's first events say. Most have nothing to say and are not parsed."""
    first = answer.look()
    if not first:
        return _Said(unfinished=_EMPTY)
    if not may_be_unfinished(first, job.endpoint.ending_words):
        return _Said(plain_bytes=len(first))
    for event in split_events(first[:WINDOW_BYTES]):
        document = event_data(event)
        if document is not None and (found := unfinished(document, job.has_effects)) is not None:
            return _Said(unfinished=found)
    return _NOTHING


def _failure(found: Unfinished, job: Job, reply: Reply) -> Failure | None:
    """The failure if the engine did not finish an answer. Nothing was sent to the client yet, so it can still get
    another replica's answer, or the status that the engine's error names."""
    if found is _EMPTY:
        return Failure(found.reason)
    if found.is_requests_fault:
        return None
    if found.error is None:
        if job.has_effects:  # it may have had them, so nobody asks for it again
            return None
        message = "The engine aborted this answer before it was complete, and no other replica could give it."
        error = ApiError(found.status, "answer_aborted", message)
        body = error_body(error, job.endpoint.api, reply.request_id)
    elif job.endpoint.api == "anthropic":
        body = orjson.dumps({"type": "error", "error": found.error})
    else:
        body = orjson.dumps({"error": found.error})
    return Failure(found.reason, found.status, _JSON, body)
