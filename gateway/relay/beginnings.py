"""What the beginning of an answer says: whether its engine finished it, and whether the replica serves the request."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple

import orjson

from gateway.errors import ApiError
from gateway.relay.endings import (
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
from gateway.relay.relay import MAX_GATHERED_BYTES, MAX_READ_BYTES, json_object
from gateway.relay.reply import passed_headers
from gateway.relay.retries import Failure
from gateway.relay.token_ids import without_prompt_ids
from gateway.request.job import Job
from gateway.upstream import Answer
from gateway.upstream.excerpts import WINDOW_BYTES

_EMPTY = Unfinished("empty")
_OPENINGS = (b"event: response.created\n", b"event: response.in_progress\n")
"""How the events begin that announce a response."""
_MOST_OPENING_BYTES = 2**18
"""An announcement that is larger is passed on at once. That of a response has its instructions and tools twice."""
_JSON = ((b"content-type", b"application/json"),)


async def declined(answer: Answer, held: HeldBytes) -> Failure:
    """The replica refused. The answer is kept, if there is room, and passed on only if no other replica can serve."""
    body = answer.take() if await gathered(answer, held) else None
    held.keep()
    return Failure(f"status_{answer.status}", answer.status, tuple(passed_headers(answer)), body)


def gathered(answer: Answer, held: HeldBytes) -> Coroutine[Any, Any, bool]:
    """Gathers an answer that is no stream of events. False if it is too large, if there is no room for it, or if it is
    to be passed on as it comes."""
    return answer.gathered(0 if answer.comes_in_pieces else MAX_GATHERED_BYTES, held.has_room)


async def begun(job: Job, answer: Answer, held: HeldBytes) -> bool:
    """Waits for the first events of a stream that do more than announce it. vLLM announces a chat or a message together
    with its first token, or with the news that it was aborted before; a response at once. Clients learn at once of one
    that has effects. True if the stream is complete."""
    size_bytes = 0
    while not await answer.gathered(size_bytes, held.has_room):
        first = answer.look()
        if not size_bytes < len(first) <= _MOST_OPENING_BYTES or not _only_open(first, job.has_effects):
            return False
        size_bytes = len(first)
    return True


def _only_open(events: bytes, has_effects: bool) -> bool:
    for event in reversed(split_events(events)):
        if event.startswith(_OPENINGS) and not has_effects:
            continue
        if len(event) > WINDOW_BYTES or not _only_opens(event):  # others that open a stream are small
            return False
    return True


def _only_opens(event: bytes) -> bool:
    if not may_open(event) and b"data" in event:
        return False
    if not read_event(event).data:  # a comment
        return True
    return (document := event_data(event)) is not None and opens(document)


class Said(NamedTuple):
    """What an answer says, as far as it was read."""

    document: dict[str, Any] | None = None
    """A whole answer's content."""
    unfinished: Unfinished | None = None
    """Why its engine did not finish it."""
    plain_bytes: int = 0
    """So many bytes at the beginning of a stream are known not to say that it is unfinished."""


_NOTHING = Said()


def says(job: Job, answer: Answer, is_whole: bool) -> Said:
    """What a gathered answer says. A large one is parsed only if it may say that it is not finished."""
    if not is_whole or answer.status >= 400 or not job.endpoint.is_generated:
        return _NOTHING
    body = answer.look()
    if len(body) > MAX_READ_BYTES and not whole_may_be_unfinished(body, job.endpoint.api):
        return _NOTHING
    document = json_object(body)
    return Said(document, unfinished(document))


def begins(job: Job, answer: Answer) -> Said:
    """What a stream's first events say. Most have nothing to say and are not parsed."""
    first, _ = without_prompt_ids(answer.look())
    if not first:
        return Said(unfinished=_EMPTY)
    if not may_be_unfinished(first, job.endpoint.ending_words):
        return Said(plain_bytes=len(first))
    for event in split_events(first[:_MOST_OPENING_BYTES]):
        document = event_data(event) if len(event) <= WINDOW_BYTES else None  # larger ones announce a response
        if document is not None and (found := unfinished(document, job.has_effects)) is not None:
            return Said(unfinished=found)
    return _NOTHING


def failure_of(found: Unfinished, job: Job) -> Failure | None:
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
        body = error_body(error, job.endpoint.api, job.id)
    elif job.endpoint.api == "anthropic":
        body = orjson.dumps({"type": "error", "error": found.error})
    else:
        body = orjson.dumps({"error": found.error})
    return Failure(found.reason, found.status, _JSON, body)
