"""The attempts of one request: place, send, and either relay the answer or try elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.admission import Admission
from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.excerpts import WINDOW_BYTES
from gateway.fleet import Fleet
from gateway.held import Held
from gateway.job import Job, no_replica, with_fields
from gateway.metrics import Metrics
from gateway.relay import MAX_GATHERED_BYTES, Relay, StreamBroken, asks_token_ids
from gateway.reply import Reply, passed_headers
from gateway.routing.router import Router, Ticket
from gateway.settings import GatewaySettings
from gateway.sse import event_data
from gateway.upstream import Answer, Upstream, UpstreamError

_RETRIED = frozenset({429, 500, 502, 503, 504})
_OVERLOADED = 429
_COMPUTE_NOTHING = frozenset({"/tokenize"})


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed before its first byte; `status` 0: the replica gave no answer."""

    reason: str
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


class Attempts:
    """Runs the attempts of a request until one is answered."""

    def __init__(
        self,
        settings: GatewaySettings,
        router: Router,
        fleet: Fleet,
        upstream: Upstream,
        relay: Relay,
        metrics: Metrics,
        admission: Admission,
    ) -> None:
        self._admission = admission
        self._timeouts = settings.timeouts
        self._max_attempts = settings.retries.max_attempts
        self._dp_ranks = {r.id: str(r.dp_rank) for r in settings.replicas if r.dp_rank is not None}
        self._deadlines = Deadlines()
        self._router = router
        self._fleet = fleet
        self._upstream = upstream
        self._relay = relay
        self._metrics = metrics

    async def run(self, job: Job, reply: Reply) -> None:
        """Answer the client. Raises ApiError when nobody could, or when a started stream broke."""
        try:
            with self._deadlines.within(self._timeouts.request_s, reply.task):
                await self._run(job, reply)
        except TimeoutError:
            raise ApiError(
                504, "deadline_exceeded", f"No complete answer within {self._timeouts.request_s:g} s."
            ) from None

    async def _run(self, job: Job, reply: Reply) -> None:
        tried: list[str] = []
        reservations: list[str] = []
        failure: Failure | None = None
        pool = self._router.pool(job)
        held = Held(self._admission)
        try:
            while len(tried) < self._max_attempts:
                # A failed attempt's reservation is given back by the next placement, in the same step.
                ticket = await self._router.place(job, tried, reservations[-1] if reservations else "")
                if ticket is None:
                    break
                if failure is not None:
                    self._metrics.retries.inc(failure.reason)
                reservations.append(ticket.request.reservation)
                reply.note(ticket, job.caller.sees_decisions)
                failure = await self._attempt(job, ticket, reply, held)
                if failure is None:
                    return
                tried.append(ticket.replica)
        finally:
            held.let_go()
            for reservation in reservations:
                pool.done(reservation)
        await self._give_up(failure, reply)

    async def _give_up(self, failure: Failure | None, reply: Reply) -> None:
        if failure is None:
            raise no_replica()
        if failure.status:
            reply.whole(failure.status, failure.headers, failure.body)
            return
        raise ApiError(
            502, "replica_unreachable", f"No replica answered ({failure.reason}).", headers={"retry-after": "1"}
        )

    async def _attempt(self, job: Job, ticket: Ticket, reply: Reply, held: Held) -> Failure | None:
        """One attempt: None when the client was answered, whatever the answer."""
        answer: Answer | None = None
        try:
            with self._deadlines.within(self._timeouts.first_byte_s if job.stream else None, reply.task):
                answer = await self._upstream.send(
                    job.method, ticket.url, job.target, self._headers(job, ticket), _body(job, ticket) or None
                )
                if answer.status in _RETRIED:
                    return await self._declined(ticket, answer, held)
                streamed = answer.status == 200 and answer.is_event_stream
                is_whole = await answer.gathered(0 if streamed else MAX_GATHERED_BYTES, held.has_room)
            if streamed and (reason := _broken_start(answer.look())):
                return self._failed(ticket, reason)
            ticket.computed = answer.status < 400 and job.path not in _COMPUTE_NOTHING
            self._router.succeeded(ticket)
            if is_whole and not streamed:
                await self._relay.whole(job, ticket, reply, answer)
            else:
                await self._relayed(job, ticket, reply, answer, held, streamed)
            return None
        except UpstreamError as error:
            return self._failed(ticket, error.reason)
        except TimeoutError:
            return self._failed(ticket, "timeout")
        finally:
            if answer is not None:
                answer.close()
            if not ticket.computed:
                self._router.withdraw(ticket)

    async def _relayed(
        self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, held: Held, streamed: bool
    ) -> None:
        relay = self._relay.stream if streamed else self._relay.large
        try:
            await relay(job, ticket, reply, answer, held)
        except StreamBroken as broken:
            if broken.by_replica:
                self._failed(ticket, broken.reason)
            self._metrics.broken_streams.inc()
            message = f"The replica broke off this answer ({broken.reason}); it is incomplete."
            raise ApiError(502, "stream_broken", message) from broken

    def _headers(self, job: Job, ticket: Ticket) -> dict[str, str]:
        rank = self._dp_ranks.get(ticket.replica)
        return job.headers if rank is None else {**job.headers, "x-data-parallel-rank": rank}

    def _failed(self, ticket: Ticket, reason: str) -> Failure:
        self._router.failed(ticket)
        self._fleet.doubt(ticket.replica)
        return Failure(reason)

    async def _declined(self, ticket: Ticket, answer: Answer, held: Held) -> Failure:
        """The replica answered that it cannot: passed on only if nobody else can, and if there is room to keep it."""
        is_whole = await answer.gathered(MAX_GATHERED_BYTES, held.has_room)
        if answer.status != _OVERLOADED:
            self._router.failed(ticket)
        reason = f"status_{answer.status}"
        if not is_whole:
            return Failure(reason)
        return Failure(reason, answer.status, tuple(passed_headers(answer)), answer.take())


def _body(job: Job, ticket: Ticket) -> bytes:
    """The body for this replica: where its agent has to learn what an answer was computed from, asked to tell."""
    if ticket.placement is None or job.is_batch:
        return job.body
    asked: dict[str, Any] = {}
    if ticket.placement.report:
        asked["vllm_xargs"] = {"kv_cache_report_mode": "full"}
    if asks_token_ids(job, ticket):
        asked["return_token_ids"] = True
    return with_fields(job.body, asked) if asked else job.body


def _broken_start(first: bytes) -> str:
    """Why a stream's first bytes mean that the replica failed; empty when they do not. vLLM reports an engine that
    died as an event, under a status of 200."""
    if not first:
        return "empty"
    if b'"error"' not in first:
        return ""
    document = event_data(first[:WINDOW_BYTES])
    error = document.get("error") if document is not None else None
    code = error.get("code") if isinstance(error, dict) else None
    return "error_event" if isinstance(code, int) and code >= 500 else ""
