"""An answer on its way from a replica to the client, and what it teaches: usage, token ids, stored responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from coordinator.engine.light_json import is_light
from coordinator.pool.engine_feedback import tell_measured
from gateway.relay.audit import Audit, read_usage
from gateway.relay.held import HeldBytes
from gateway.relay.reply import Reply, passed_headers
from gateway.relay.sse import MAX_EVENT_BYTES, MAX_PARSED_BYTES, EventRelay, split_events, take_token_ids
from gateway.relay.stored_responses import Responses
from gateway.replicas.progress import Progress
from gateway.request.job import Job
from gateway.request.reader import Reader
from gateway.routing.router import Ticket
from gateway.upstream import Answer, UpstreamError
from gateway.upstream.excerpts import WINDOW_BYTES, last_usage

# Where an answer's usage counts exactly the one prompt, and where vLLM returns token ids.
_MEASURED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_TOKEN_ID_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
# The line with which a complete stream's last event begins, on the paths where that is defined.
_DONE = (b"data: [DONE]", b"data:[DONE]")
_END_MARKS = {
    "/v1/chat/completions": _DONE,
    "/v1/completions": _DONE,
    "/v1/messages": (b"event: message_stop", b"event: error"),
    "/v1/responses": tuple(
        b"event: response." + state for state in (b"completed", b"failed", b"incomplete", b"cancelled")
    ),
}
_PREFACE = tuple(
    b"event: response." + state + end for state in (b"created", b"queued", b"in_progress") for end in (b"\n", b"\r")
)

MAX_GATHERED_BYTES = 2**20
"""An answer that is not streamed is gathered up to here, and can be asked for again until then."""
_MAX_READ_BYTES = 2**16
"""Of answers that are parsed only to learn from them."""
_WRITE_AHEAD_BYTES = 2**16
_UNCOUNTED_BYTES = 2**16


class StreamBroken(Exception):
    """A stream ended before its end mark; `by_replica`: its connection failed, it did not end by itself."""

    def __init__(self, reason: str, *, by_replica: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_replica = by_replica


class Relay:
    """Passes answers on to clients, and learns from them."""

    def __init__(self, reader: Reader, responses: Responses, audit: Audit, progress: Progress) -> None:
        self._pieces = progress.pieces
        self._reader = reader
        self._responses = responses
        self._audit = audit

    async def whole(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer) -> None:
        """Pass on an answer that was gathered; what it holds is free for others once the client has taken it."""
        body = answer.take()
        self._pieces[ticket.replica] += 1
        _confirm(ticket)
        if _teaches(job, ticket):
            is_asked = asks_token_ids(job, ticket) and len(body) <= MAX_PARSED_BYTES and is_light(body)
            document = self._read(job, ticket, body, parse=is_asked or len(body) <= _MAX_READ_BYTES)
            self._learn(job, ticket, document, take_token_ids(document) if is_asked else [])
            body = orjson.dumps(document) if is_asked and document and not job.wants_token_ids else body
        ticket.pool.done(ticket.request.reservation)  # before the client, who may ask on at once, hears of it
        if len(body) <= _WRITE_AHEAD_BYTES:
            reply.whole(answer.status, passed_headers(answer), body)
            return
        reply.start_body(answer, len(body))
        await _ended(reply, body, reply.drained)

    async def large(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, held: HeldBytes) -> None:
        """Relay an answer that is not to be gathered as it comes. Raises StreamBroken when it breaks off."""
        _confirm(ticket)
        end = b""

        def pass_on(piece: bytes) -> bool:
            nonlocal end
            self._pieces[ticket.replica] += 1
            end = (end + piece)[-WINDOW_BYTES:] if len(piece) < WINDOW_BYTES else piece[-WINDOW_BYTES:]
            return reply.more(piece)

        async def drained() -> None:
            await _drained(reply, held)

        if _teaches(job, ticket):
            self._responses.notice(job, ticket, answer.look())
        reply.start_body(answer, answer.content_length)
        try:
            if not pass_on(answer.take()):
                await drained()
            held.let_go()
            last = await answer.relay(pass_on, drained)
        except UpstreamError as error:
            raise StreamBroken(error.reason, by_replica=True) from error
        ticket.pool.done(ticket.request.reservation)
        if _teaches(job, ticket):
            self._learn(job, ticket, {"usage": last_usage(end + last)}, [])
        await _ended(reply, last, drained)

    async def stream(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, held: HeldBytes) -> None:
        """Relay events as they come. Raises StreamBroken when the stream breaks off."""
        watch = self._watch(job, ticket, reply) if job.path == "/v1/responses" else None
        if watch is None:
            _begun(ticket)
        relay = EventRelay(
            job.strip_usage,
            _END_MARKS.get(job.path, ()),
            reads_token_ids=asks_token_ids(job, ticket),
            strip_token_ids=not job.wants_token_ids,
        )
        reason, pieces = "", self._pieces

        def complete(piece: bytes) -> bytes:
            ready = relay.feed(piece)
            if watch is None:
                pieces[ticket.replica] += 1
            elif ready:
                watch(ready)
            return ready

        def pass_on(piece: bytes) -> bool:
            nonlocal reason
            if ready := complete(piece):
                return reply.more(ready)
            reason = _why_not_held(relay.held_bytes, held)
            return not reason

        async def drained() -> None:
            if reason:
                raise StreamBroken(reason, by_replica=False)
            await _drained(reply, held)

        reply.start_stream(answer)
        try:
            last = await answer.relay(pass_on, drained)
        except UpstreamError as error:
            raise StreamBroken(error.reason, by_replica=True) from error
        ready = complete(last) if last else b""
        rest = relay.finish()
        if reason or not relay.saw_end:
            if ready:
                reply.more(ready)
            raise StreamBroken(reason or "ended early", by_replica=False)
        ticket.pool.done(ticket.request.reservation)
        self._learn(job, ticket, {"usage": relay.usage}, relay.prompt_token_ids)
        await _ended(reply, ready + rest, drained)

    def _watch(self, job: Job, ticket: Ticket, reply: Reply) -> Callable[[bytes], None]:
        """What looks at the events of a response as they pass: for its first token, its id and their numbers."""
        has_begun = False

        def watch(events: bytes) -> None:
            nonlocal has_begun
            if not has_begun and not _is_preface(events):
                has_begun = True
                _begun(ticket)
            self._pieces[ticket.replica] += has_begun
            if not job.response_noted:
                self._responses.notice(job, ticket, events)
            if b'"sequence_number"' in events:
                reply.numbered_events = events

        return watch

    def _read(self, job: Job, ticket: Ticket, body: bytes, parse: bool) -> dict[str, Any]:
        """What is to be learned from an answer: all of it, or without parsing it no more than its usage."""
        if parse:
            return _json_object(body)
        self._responses.notice(job, ticket, body)
        return {"usage": last_usage(body)}

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
    _confirm(ticket)


def _confirm(ticket: Ticket) -> None:
    if ticket.computed and ticket.placement is not None:
        ticket.pool.confirm(ticket.request, ticket.placement)


def _teaches(job: Job, ticket: Ticket) -> bool:
    """Whether something can be learned from an answer that is not streamed."""
    return ticket.computed and job.prompt is not None and bool(job.prompt.keys)


async def _drained(reply: Reply, held: HeldBytes) -> None:
    """Until the client has taken most of what was sent on. What waits for it is counted, so it leaves less room for
    others, but it is not given up."""
    held.hold(reply.unsent_bytes)
    await reply.drained()
    held.let_go()


async def _ended(reply: Reply, last: bytes, drained: Callable[[], Awaitable[None]]) -> None:
    """End an answer with its last piece. What is left to the connection then is little: nobody counts it any more.
    Whoever ends the wait for that (a shutdown, a deadline): the answer is complete."""
    try:
        if len(last) > _WRITE_AHEAD_BYTES:
            has_room, last = reply.more(last), b""
            if not has_room:
                await drained()
    finally:
        reply.end(last)


def _why_not_held(size_bytes: int, held: HeldBytes) -> str:
    """Why so much of an event that is not complete cannot be held; empty where it can. Little is not counted."""
    if size_bytes > MAX_EVENT_BYTES:
        return "event_too_large"
    return "" if size_bytes <= _UNCOUNTED_BYTES or held.has_room(size_bytes) else "no_room"


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


def _is_preface(events: bytes) -> bool:
    """Whether a stream has only said that it will begin: responses are announced before their prompt is computed."""
    return all(event.startswith(_PREFACE) for event in split_events(events))


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
