"""Passes a replica's answer on to the client, and learns from it: usage, cached tokens, stored objects.

An answer comes in one of three ways: whole (small, gathered first), large (passed on as it comes), or as a stream of
events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson

from coordinator.placement import NOTHING
from coordinator.pool.engine_feedback import tell_measured
from gateway.relay.asked_name import AskedName
from gateway.relay.audit import Audit, read_usage
from gateway.relay.charges import Charges
from gateway.relay.endings import ABORTED, FINISHES, says_no_end
from gateway.relay.events import kind_of, split_events
from gateway.relay.held import HeldBytes
from gateway.relay.reply import Reply, passed_headers
from gateway.relay.sse import MAX_EVENT_BYTES, EventRelay
from gateway.relay.stored_objects import StoredObjects, noted
from gateway.relay.token_ids import without_ids
from gateway.relay.tries import Tries
from gateway.replicas.hangs import AnswerProgress
from gateway.request.job import Job
from gateway.request.reader import Reader
from gateway.routing.ticket import Ticket
from gateway.upstream import Answer, UpstreamError
from gateway.upstream.excerpts import WINDOW_BYTES, last_usage

_PREFACE = (b"response.created", b"response.queued", b"response.in_progress", b"")

MAX_GATHERED_BYTES = 2**20
"""An answer that is not streamed is gathered up to this size. Until then, another replica can be asked instead."""
MAX_READ_BYTES = 2**16
"""A larger answer is not parsed to learn from it. Only its usage is looked for."""
_WRITE_AHEAD_BYTES = 2**16
_UNCOUNTED_BYTES = 2**16
_SEAM_BYTES = 64
"""A finish reason may begin this many bytes before a new piece."""


class StreamBroken(Exception):
    """An answer broke off. `by_replica`: its connection failed; otherwise it ended too early, its engine did not finish
    it, or an event was too large to hold."""

    def __init__(self, reason: str, *, by_replica: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_replica = by_replica


class Relay:
    """Passes answers on to clients, and learns from them."""

    def __init__(
        self, reader: Reader, objects: StoredObjects, audit: Audit, progress: AnswerProgress, charges: Charges
    ) -> None:
        self._charges = charges
        self._pieces = progress.pieces
        self._reader = reader
        self._objects = objects
        self._audit = audit

    async def whole(
        self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, document: dict[str, Any] | None
    ) -> None:
        """Passes on an answer that was gathered. Its bytes count as held until the client has taken them. `document` is
        its content, if somebody has read it."""
        body = answer.take()
        self._pieces[ticket.replica] += 1
        if ticket.is_computed:
            body = without_ids(body) if _hides_ids(job, ticket) else body
            document = self._read(job, ticket, reply, body) if document is None else document
            self._learn(job, ticket, reply, document)
            await noted(reply)
        name = _asked_name(job, ticket, answer)
        body = name.in_body(body) if name is not None else body
        if answer.status >= 400:
            ticket.used = NOTHING
        ticket.done()  # before the answer: the client may ask on at once
        if job.method == "HEAD":  # the length is that of the answer to a GET
            reply.start_body(answer, answer.content_length if name is None else None)
            reply.end()
            return
        if len(body) + answer.head_bytes <= _WRITE_AHEAD_BYTES:
            reply.whole(answer.status, passed_headers(answer), body)
            return
        reply.start_body(answer, len(body))
        await _ended(reply, body, reply.drained, answer.head_bytes)

    async def large(self, job: Job, ticket: Ticket, reply: Reply, answer: Answer, held: HeldBytes) -> None:
        """Passes on an answer as it comes. Raises StreamBroken if it breaks off."""
        end, is_aborted, name = b"", False, _asked_name(job, ticket, answer)
        is_generated = job.endpoint.is_generated and answer.status < 400

        def pass_on(piece: bytes) -> bool:
            nonlocal end, is_aborted
            self._pieces[ticket.replica] += 1
            is_aborted = is_aborted or (is_generated and says_no_end(end[-_SEAM_BYTES:] + piece))
            end = (end + piece)[-WINDOW_BYTES:] if len(piece) < WINDOW_BYTES else piece[-WINDOW_BYTES:]
            return reply.more(piece if name is None else name.in_piece(piece))

        async def drained() -> None:
            await _drained(reply, held)

        if answer.status >= 400:
            ticket.used = NOTHING
        if ticket.is_computed:
            ticket.pool.first_token(ticket.request.reservation)
            self._objects.notice(job, ticket, reply, answer.look())
        reply.start_body(answer, answer.content_length if name is None else None)
        try:
            if not pass_on(answer.take()):
                await drained()
            held.let_go()
            last = await answer.relay(pass_on, drained)
        except UpstreamError as error:
            raise StreamBroken(error.reason, by_replica=True) from error
        if is_aborted or (is_generated and says_no_end(end[-_SEAM_BYTES:] + last)):
            raise StreamBroken(ABORTED, by_replica=False)
        if ticket.is_computed:
            self._learn(job, ticket, reply, {"usage": last_usage(end + last)})
        ticket.done()
        await _ended(reply, last if name is None else name.in_piece(last) + name.rest(), drained)

    async def stream(
        self, job: Job, tries: Tries, reply: Reply, answer: Answer, held: HeldBytes, plain_bytes: int
    ) -> None:
        """Passes on events as they come. So many bytes of its beginning are known not to say that it is unfinished.
        Raises StreamBroken if the stream breaks off."""
        ticket = tries.ticket
        watch, events = self._begun(job, ticket, reply), _event_relay(job, tries, plain_bytes)
        reason, pieces, as_asked = "", self._pieces, _as_asked(job, tries, reply)

        def complete(piece: bytes) -> bytes:
            ready = events.feed(piece)
            if watch is None:
                pieces[ticket.replica] += 1
            elif ready:
                watch(ready)
            return as_asked(ready)

        def pass_on(piece: bytes) -> bool:
            nonlocal reason
            ready = complete(piece)
            reason = events.unfinished or tries.why_lost or ("" if ready else _why_not_held(events.held_bytes, held))
            has_room = not ready or reply.more(ready)
            return has_room and not reason

        async def drained() -> None:
            if reason:
                raise StreamBroken(reason, by_replica=False)
            await _drained(reply, held)

        reply.start_stream(answer)
        try:
            last = await answer.relay(pass_on, drained)
        except UpstreamError as error:
            if not events.has_ended:
                raise StreamBroken(error.reason, by_replica=True) from error
            last = b""
        ready = complete(last) if last else b""
        rest = events.finish()
        if not (reason := reason or events.why_incomplete):  # else the client does not get the rest
            rest = as_asked(rest)
            reason = tries.why_lost
        if reason:
            if ready:
                reply.more(ready)
            raise StreamBroken(reason, by_replica=False)
        self._learn(job, ticket, reply, {"usage": tries.whole_usage(events.usage)})
        ticket.forces_usage = events.forces_usage
        ticket.done()
        await _ended(reply, ready + rest, drained)

    def _begun(self, job: Job, ticket: Ticket, reply: Reply) -> Callable[[bytes], None] | None:
        """Notes the first token, unless the events will show it. Returns what must see all events, if anything."""
        if job.endpoint.stores_responses:
            return self._watch(job, ticket, reply)
        if job.endpoint.computes_prompt:
            ticket.first_token()
        return self._watch_choices(ticket) if job.choices > 1 else None

    def _watch(self, job: Job, ticket: Ticket, reply: Reply) -> Callable[[bytes], None]:
        """Watches the events of a stored response: for its first token, its id, and the numbers of its events."""
        has_begun = False

        def watch(events: bytes) -> None:
            nonlocal has_begun
            if not has_begun and not _is_preface(events):
                has_begun = True
                ticket.first_token()
            self._pieces[ticket.replica] += has_begun
            if reply.object_noting is None:
                self._objects.notice(job, ticket, reply, events)
            if b'"sequence_number"' in events:
                reply.numbered_events = events

        return watch

    def _watch_choices(self, ticket: Ticket) -> Callable[[bytes], None]:
        """Watches the events of several choices: for those that end before others."""

        def watch(events: bytes) -> None:
            self._pieces[ticket.replica] += 1
            if ended := sum(map(events.count, FINISHES)):
                ticket.choices_ended(ended)

        return watch

    def _read(self, job: Job, ticket: Ticket, reply: Reply, body: bytes) -> dict[str, Any]:
        """The document of an answer. Of a large one only its usage, without parsing it."""
        if len(body) <= MAX_READ_BYTES:
            return json_object(body)
        self._objects.notice(job, ticket, reply, body)
        return {"usage": last_usage(body)}

    def _learn(self, job: Job, ticket: Ticket, reply: Reply, document: dict[str, Any]) -> None:
        """Learns the size of prompts, the tokens that were cached, and the replica of a stored response."""
        self._objects.notice_whole(job, ticket, reply, document)
        usage = reply.usage = read_usage(document.get("usage"))
        if usage is None:
            self._charges.untold(job, ticket)
            return
        self._charges.told(job, ticket, usage)
        prompt = job.route.prompt
        if prompt is None or not prompt.keys or job.is_batch:
            return
        self._reader.estimator(job.route.served.pool).observe(prompt, usage.prompt_tokens)
        if job.reads_cache:
            reply.cached_tokens = self._audit.observe(ticket, usage)
        placement = ticket.placement
        if placement is not None and placement.claimed_from and job.endpoint.usage_counts_prompt:
            tell_measured(ticket.pool, ticket.request, placement, usage.prompt_tokens)


def _seen_tokens(job: Job, events: EventRelay) -> int:
    """The tokens in what has come of a stream. A chat begins with a part without a token for each choice."""
    parts = events.parts - (job.choices if job.endpoint.prompt == "chat" else 0)
    usage = read_usage(events.usage)
    told = max(sum(events.running_tokens.values()), usage.output_tokens if usage is not None else 0)
    return max(0, parts, told)


def _event_relay(job: Job, tries: Tries, plain_bytes: int) -> EventRelay:
    """What reads the events of an attempt's stream."""
    ticket, of, sent = tries.ticket, job.endpoint, tries.sent if tries.seam is None else None
    strips, hides = job.strip_usage or ticket.asks_usage, _hides_ids(job, ticket)
    words, has_effects = of.ending_words, job.has_effects
    events = EventRelay(strips, of.ends, hides, of.token_mark, job.choices, words, has_effects, plain_bytes, sent)
    if tries.seam is None:
        ticket.seen_tokens = partial(_seen_tokens, job, events)
    return events


def _as_asked(job: Job, tries: Tries, reply: Reply) -> Callable[[bytes], bytes]:
    """Turns a replica's events into what the client has asked for."""
    if (seam := tries.seam) is not None:

        def joined(ready: bytes) -> bytes:
            events = seam.events(ready)
            reply.numbered_events = events or reply.numbered_events
            return events

        return joined
    other_name = tries.ticket.other_name
    return AskedName(other_name, job.model).in_events if other_name and job.model else bytes


def _hides_ids(job: Job, ticket: Ticket) -> bool:
    """Whether the answer has token ids that only the gateway wants."""
    return ticket.asks_ids and not job.wants_token_ids


def _asked_name(job: Job, ticket: Ticket, answer: Answer) -> AskedName | None:
    """What gives an answer in JSON the name that its client asked for; None if it stays as it is. So do errors."""
    if not ticket.other_name or job.model is None or answer.status >= 400 or not answer.is_json:
        return None
    return AskedName(ticket.other_name, job.model)


async def _drained(reply: Reply, held: HeldBytes) -> None:
    """Waits until the client has taken most of what was sent. Meanwhile the unsent bytes count as held and leave less
    room for other requests. The answer is never given up for lack of room."""
    held.hold(reply.unsent_bytes)
    await reply.drained()
    held.let_go()


async def _ended(reply: Reply, last: bytes, drained: Callable[[], Awaitable[None]], unsent_head_bytes: int = 0) -> None:
    """Ends an answer with its last piece. The few bytes that the connection then holds are not counted. The answer is
    complete even if a shutdown or a deadline ends the wait."""
    try:
        if len(last) + unsent_head_bytes > _WRITE_AHEAD_BYTES:
            has_room, last = reply.more(last), b""
            if not has_room:
                await drained()
    finally:
        reply.end(last)


def _why_not_held(size_bytes: int, held: HeldBytes) -> str:
    """Why an unfinished event of this size cannot be held; empty if it can. A small one is not counted."""
    if size_bytes > MAX_EVENT_BYTES:
        return "event_too_large"
    return "" if size_bytes <= _UNCOUNTED_BYTES or held.has_room(size_bytes) else "no_room"


def _is_preface(events: bytes) -> bool:
    """Whether these events only announce a response, or are comments. They come before its prompt is computed."""
    return all(kind_of(event) in _PREFACE for event in split_events(events))


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that an answer is. An empty one if it is something else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
