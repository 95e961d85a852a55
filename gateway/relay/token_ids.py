"""Takes token ids out of an answer that the gateway has asked for, and its client has not.

Agents before version 0.2 follow engines before vLLM 0.30 by the token ids of prompts (mode `token_ids`). Requests that
claim keys there ask for them. A stream that is to go on at another replica will need its own token ids, too.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from coordinator.engine.light_json import is_light
from gateway.relay.events import event_data, split_events, with_data
from gateway.request.reader import Job
from gateway.routing.ticket import Ticket

ASK: Final = {"return_token_ids": True}
"""The field that asks vLLM for the token ids of the prompt."""
_MAX_PARSED_BYTES = 2**20
"""A larger answer or event is passed on with its token ids: parsing it would hold the event loop."""


class TokenIds:
    """The token ids in one answer."""

    def __init__(self, strip: bool) -> None:
        self.of_prompt: list[int] = []
        """Those of the first prompt; empty until they were found."""
        self._strip = strip

    def take_from_events(self, events: bytes) -> bytes:
        """Reads events of a stream; returns the events for the client."""
        if b"token_ids" not in events:
            return events
        return b"".join(map(self._take_from_event, split_events(events)))

    def _take_from_event(self, event: bytes) -> bytes:
        document = event_data(event) if _is_readable(event) else None
        if document is None:
            return event
        self._take(document)
        return with_data(event, document) if self._strip else event

    def take_from_body(self, body: bytes) -> bytes:
        """Reads an answer in one piece; returns the body for the client."""
        try:
            document = orjson.loads(body) if _is_readable(body) else None
        except orjson.JSONDecodeError:
            return body
        if not isinstance(document, dict):
            return body
        self._take(document)
        return orjson.dumps(document) if self._strip else body

    def _take(self, document: dict[str, Any]) -> None:
        choices = [choice for choice in document.get("choices") or () if isinstance(choice, dict)]
        found = document.pop("prompt_token_ids", None)
        for choice in choices:
            choice.pop("token_ids", None)
            of_choice = choice.pop("prompt_token_ids", None)  # text completions have them here
            found = found or of_choice
        if not self.of_prompt and isinstance(found, list):
            self.of_prompt = found


def asked_token_ids(job: Job, ticket: Ticket) -> TokenIds | None:
    """The token ids that this attempt asks for; None if it asks for none."""
    placement = ticket.placement
    if placement is None or placement.mode != "token_ids" or not placement.claimed_from:
        return None
    if not job.endpoint.returns_token_ids or job.is_batch:
        return None
    return TokenIds(strip=not job.wants_token_ids)


def _is_readable(data: bytes) -> bool:
    return b"token_ids" in data and len(data) <= _MAX_PARSED_BYTES and is_light(data)
