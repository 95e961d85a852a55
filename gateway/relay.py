"""An answer on its way from a replica to the client, and what it teaches: usage, token ids, stored responses."""

from __future__ import annotations

import re
from typing import Any

import orjson

from coordinator.truth import tell_measured
from gateway.audit import Audit, read_usage
from gateway.job import Job
from gateway.reader import Reader
from gateway.reply import Reply, passed_headers
from gateway.responses import Responses
from gateway.routing.router import Ticket
from gateway.sse import EventRelay, take_token_ids
from gateway.upstream import Answer, UpstreamError

# Where an answer's usage counts exactly the one prompt, and where vLLM returns token ids.
_MEASURED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
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


class StreamBroken(Exception):
    """A stream ended before its end mark; `by_replica`: its connection failed, it did not end by itself."""

    def __init__(self, reason: str, *, by_replica: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_replica = by_replica


class Relay:
    """Passes answers on to clients, and learns from them."""

    def __init__(self, reader: Reader, responses: Responses, audit: Audit) -> None:
        self._reader = reader
        self._responses = responses
        self._audit = audit

    def whole(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, body: bytes) -> None:
        """Pass on an answer that came in one piece."""
        if ticket.computed and ticket.placement is not None:
            ticket.pool.confirm(ticket.request, ticket.placement)
        if ticket.computed and job.prompt is not None and job.prompt.keys:
            document = _json_object(body)
            asked = asks_token_ids(job, ticket)
            self._learn(job, ticket, document, take_token_ids(document) if asked else [])
            body = orjson.dumps(document) if asked and document and not job.wants_token_ids else body
        ticket.pool.done(ticket.request.reservation)  # before the client, who may ask on at once, hears of it
        reply.whole(answer.status, passed_headers(answer), body)

    async def stream(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, first: bytes) -> None:
        """Relay events as they come. Raises StreamBroken when the stream breaks off."""
        is_response = job.path == "/v1/responses"
        has_begun = not is_response
        if has_begun:
            _begun(ticket)
        relay = EventRelay(
            job.strip_usage,
            _END_MARKS.get(job.path, ()),
            reads_token_ids=asks_token_ids(job, ticket),
            strip_token_ids=not job.wants_token_ids,
        )
        reply.start_stream(answer)

        def pass_on(piece: bytes) -> bool:
            nonlocal has_begun
            if not has_begun and not _is_preface(piece):
                has_begun = True
                _begun(ticket)
            ready = relay.feed(piece)
            if not ready:
                return True
            if is_response:
                self._responses.notice(job, ticket, ready)
                if b'"sequence_number"' in ready:
                    reply.numbered_events = ready
            return reply.more(ready)

        try:
            pass_on(first)
            await answer.relay(pass_on, reply.drained)
        except UpstreamError as error:
            raise StreamBroken(error.reason, by_replica=True) from error
        rest = relay.finish()
        if not relay.saw_end:
            raise StreamBroken("ended early", by_replica=False)
        if rest:
            reply.more(rest)
        ticket.pool.done(ticket.request.reservation)
        reply.end()
        self._learn(job, ticket, relay.document, relay.prompt_token_ids)

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


def _begun(ticket: Ticket) -> None:
    """The first token is here: the prompt is computed."""
    ticket.pool.first_token(ticket.request.reservation)
    if ticket.placement is not None:
        ticket.pool.confirm(ticket.request, ticket.placement)


def asks_token_ids(job: Job, ticket: Ticket) -> bool:
    """Whether this attempt's answer is asked for the token ids of its prompt."""
    placement = ticket.placement
    return (
        placement is not None
        and placement.mode == "token_ids"
        and placement.claimed_from > 0
        and job.path in _TOKEN_ID_PATHS
        and not job.is_batch
    )


def _is_preface(chunk: bytes) -> bool:
    """Whether a stream has only said that it will begin: responses are announced before their prompt is computed."""
    events = _EVENT_NAME.findall(chunk)
    return bool(events) and all(event in _PREFACE for event in events)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
