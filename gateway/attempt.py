"""The attempts of one request: place, send, and either relay the answer or try elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from coordinator.truth import tell_measured
from gateway.audit import Audit, read_usage
from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.job import Job, no_replica, with_fields
from gateway.metrics import Metrics
from gateway.reader import Reader
from gateway.reply import Reply, passed_headers
from gateway.responses import Responses
from gateway.routing.router import Router, Ticket
from gateway.settings import GatewaySettings
from gateway.sse import EventRelay, event_data, take_token_ids
from gateway.upstream import Answer, Upstream, UpstreamError

_RETRIED = frozenset({429, 500, 502, 503, 504})
_OVERLOADED = 429
# Where an answer's usage counts exactly the one prompt, and where vLLM returns token ids.
_MEASURED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_COMPUTE_NOTHING = frozenset({"/tokenize"})
_TOKEN_ID_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
# The line with which a complete stream's last event begins, on the paths where that is defined.
_DONE = (b"data: [DONE]", b"data:[DONE]")
_END_MARKS = {
    "/v1/chat/completions": _DONE,
    "/v1/completions": _DONE,
    "/v1/messages": (b"event: message_stop",),
    "/v1/responses": tuple(
        b"event: response." + state for state in (b"completed", b"failed", b"incomplete", b"cancelled")
    ),
}


_EVENT_NAME = re.compile(rb"^event: ?(\S+)", re.MULTILINE)
_PREFACE = frozenset({b"response.created", b"response.queued", b"response.in_progress"})


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
        reader: Reader,
        responses: Responses,
        audit: Audit,
        metrics: Metrics,
    ) -> None:
        self._timeouts = settings.timeouts
        self._max_attempts = settings.retries.max_attempts
        self._dp_ranks = {r.id: str(r.dp_rank) for r in settings.replicas if r.dp_rank is not None}
        self._deadlines = Deadlines()
        self._router = router
        self._fleet = fleet
        self._upstream = upstream
        self._reader = reader
        self._responses = responses
        self._audit = audit
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
                failure = await self._attempt(job, ticket, reply)
                if failure is None:
                    return
                tried.append(ticket.replica)
        finally:
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

    async def _attempt(self, job: Job, ticket: Ticket, reply: Reply) -> Failure | None:
        """One attempt: None when the client was answered, whatever the answer."""
        answer: Answer | None = None
        try:
            with self._deadlines.within(self._timeouts.first_byte_s if job.stream else None, reply.task):
                answer = await self._upstream.send(
                    job.method, ticket.url, job.target, self._headers(job, ticket), _body(job, ticket) or None
                )
                if answer.status in _RETRIED:
                    return await self._declined(ticket, answer)
                streamed = answer.status == 200 and answer.is_event_stream
                first = await answer.next_piece() if streamed else await answer.rest()
            if streamed and (reason := _broken_start(first)):
                return self._failed(ticket, reason)
            ticket.computed = answer.status < 400 and job.path not in _COMPUTE_NOTHING
            self._router.succeeded(ticket)
            if streamed:
                await self._stream(job, ticket, reply, answer, first)
            else:
                self._whole(job, ticket, reply, answer, first)
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

    def _headers(self, job: Job, ticket: Ticket) -> dict[str, str]:
        rank = self._dp_ranks.get(ticket.replica)
        return job.headers if rank is None else {**job.headers, "x-data-parallel-rank": rank}

    def _failed(self, ticket: Ticket, reason: str) -> Failure:
        self._router.failed(ticket)
        self._fleet.doubt(ticket.replica)
        return Failure(reason)

    async def _declined(self, ticket: Ticket, answer: Answer) -> Failure:
        """The replica answered that it cannot: passed on only if nobody else can."""
        body = await answer.rest()
        if answer.status != _OVERLOADED:
            self._router.failed(ticket)
        return Failure(f"status_{answer.status}", answer.status, tuple(passed_headers(answer)), body)

    def _whole(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, body: bytes) -> None:
        if ticket.computed and ticket.placement is not None:
            ticket.pool.confirm(ticket.request, ticket.placement)
        if ticket.computed and job.prompt is not None and job.prompt.keys:
            document = _json_object(body)
            asked = _asks_token_ids(job, ticket)
            self._learn(job, ticket, document, take_token_ids(document) if asked else [])
            body = orjson.dumps(document) if asked and document and not job.wants_token_ids else body
        ticket.pool.done(ticket.request.reservation)  # before the client, who may ask on at once, hears of it
        reply.whole(answer.status, passed_headers(answer), body)

    async def _stream(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, first: bytes) -> None:
        """Relay events as they come. Raises ApiError when the stream breaks off."""
        is_response = job.path == "/v1/responses"
        has_begun = not is_response
        if has_begun:
            self._begun(ticket)
        relay = EventRelay(
            job.strip_usage,
            _END_MARKS.get(job.path, ()),
            reads_token_ids=_asks_token_ids(job, ticket),
            strip_token_ids=not job.wants_token_ids,
        )
        reply.start_stream(answer)

        def pass_on(piece: bytes) -> bool:
            nonlocal has_begun
            if not has_begun and not _is_preface(piece):
                has_begun = True
                self._begun(ticket)
            ready = relay.feed(piece)
            if not ready:
                return True
            if is_response:
                self._responses.notice(job, ticket, ready)
            return reply.more(ready)

        try:
            pass_on(first)
            await answer.relay(pass_on, reply.drained)
        except UpstreamError as error:
            self._failed(ticket, error.reason)
            raise self._broken(error.reason) from error
        rest = relay.finish()
        if not relay.saw_end:
            raise self._broken("ended early")
        if rest:
            reply.more(rest)
        ticket.pool.done(ticket.request.reservation)
        reply.end()
        self._learn(job, ticket, relay.document, relay.prompt_token_ids)

    def _begun(self, ticket: Ticket) -> None:
        """The first token is here: the prompt is computed."""
        ticket.pool.first_token(ticket.request.reservation)
        if ticket.placement is not None:
            ticket.pool.confirm(ticket.request, ticket.placement)

    def _broken(self, reason: str) -> ApiError:
        self._metrics.broken_streams.inc()
        return ApiError(502, "stream_broken", f"The replica broke off this answer ({reason}); it is incomplete.")

    def _learn(self, job: Job, ticket: Ticket, document: dict[str, Any], token_ids: list[int]) -> None:
        """What an answer teaches: the size of prompts, what was cached, where a stored response lives."""
        self._responses.notice_whole(job, ticket, document)
        usage = read_usage(document.get("usage"))
        if usage is None or job.prompt is None or job.is_batch:
            return
        self._reader.estimator(job.served.pool).observe(job.prompt, usage.prompt_tokens)
        if job.reads_cache:
            self._audit.observe(ticket, usage)
        placement = ticket.placement
        if placement is not None and placement.claimed_from and job.path in _MEASURED_PATHS:
            tell_measured(ticket.pool, ticket.request, placement, usage.prompt_tokens, token_ids)


def _body(job: Job, ticket: Ticket) -> bytes:
    """The body for this replica: where its agent has to learn what an answer was computed from, asked to tell."""
    if ticket.placement is None or job.is_batch:
        return job.body
    asked: dict[str, Any] = {}
    if ticket.placement.report:
        asked["vllm_xargs"] = {"kv_cache_report_mode": "full"}
    if _asks_token_ids(job, ticket):
        asked["return_token_ids"] = True
    return with_fields(job.body, asked) if asked else job.body


def _is_preface(chunk: bytes) -> bool:
    """Whether a stream has only said that it will begin: responses are announced before their prompt is computed."""
    events = _EVENT_NAME.findall(chunk)
    return bool(events) and all(event in _PREFACE for event in events)


def _asks_token_ids(job: Job, ticket: Ticket) -> bool:
    placement = ticket.placement
    return (
        placement is not None
        and placement.mode == "token_ids"
        and placement.claimed_from > 0
        and job.path in _TOKEN_ID_PATHS
        and not job.is_batch
    )


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _broken_start(first: bytes) -> str:
    """Why a stream's first bytes mean that the replica failed; empty when they do not. vLLM reports an engine that
    died as an event, under a status of 200."""
    if not first:
        return "empty"
    if b'"error"' not in first:
        return ""
    document = event_data(first)
    error = document.get("error") if document is not None else None
    code = error.get("code") if isinstance(error, dict) else None
    return "error_event" if isinstance(code, int) and code >= 500 else ""
