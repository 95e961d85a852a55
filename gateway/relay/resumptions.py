"""Lets a stream that broke go on at another replica.

The rest of the answer is one more request: it is placed, queued, retried and charged as its client's own request would
be. The client pays for the prompt once, and for each token of the answer once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from coordinator.errors import StoreError
from coordinator.pool.resumed import turn_s
from gateway.endpoints import ENDPOINTS, endpoint_of
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.continuation import CHAT, Asked, Continuation, continuation, read
from gateway.relay.grammars import grammar_of
from gateway.relay.progress import NotResumable
from gateway.relay.reply import Reply
from gateway.relay.seam import Seam
from gateway.relay.sent import Sent
from gateway.relay.text_tokens import TextTokens
from gateway.relay.tries import Tries
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.request.reading.document import is_true, parse_document
from gateway.settings.limit_settings import ResumeSettings

_BROKE = frozenset(
    {
        *("reset", "idle", "protocol", "empty", "ended early", "aborted", "error_event"),
        *("dead", "hung", "unreachable", "drained"),
    }
)
_NOT = frozenset(
    {
        *("api", "no_stream", "off", "length", "memory", "events", "beginning", "max_resumptions", "short_runs"),
        *("tool_calls", "reasoning", "reasoning_content", "n", "logprobs", "echo", "response_format", "prompt"),
        *("structured_outputs", "presence_penalty", "frequency_penalty", "tool_choice", "token_ids", "place"),
        *("diverged", "restarted", "error_event", "max_tokens", "refused", "usage"),
        *("text_tokens", "ending", "tools", "tool_use", "function_call", "thinking", "store", "background"),
        *("no_replica", "replica_unreachable", "prompt_stalls_replicas", "deadline_unreachable", "queue_full"),
        *("rate_limited", "limit_exceeded", "invalid_api_key", "ended"),
    }
)
"""The reasons that metrics tell apart: fields have any name that clients give them."""
_OF_PROMPT = ("messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
"""The fields of a chat that make its prompt."""
_MAX_SHORT_RUNS = 2
_log = structlog.get_logger("kvgate.resumptions")


class Resumptions:
    """The streams of one gateway that go on elsewhere."""

    def __init__(
        self, settings: ResumeSettings, admission: Admission, text_tokens: TextTokens, metrics: Metrics
    ) -> None:
        self._admission = admission
        self._text_tokens = text_tokens
        self._metrics = metrics
        self.use(settings)

    def use(self, settings: ResumeSettings) -> None:
        """These hold from now on, for streams that run, too."""
        self._settings = settings

    def begin(self, job: Job, tries: Tries) -> None:
        """A stream begins. What its client gets is kept if the stream could go on elsewhere."""
        if tries.seam is None and not job.not_resumed and self._settings.enabled:
            tries.sent = Sent(self._admission, self._settings.max_tokens, job.endpoint.api != "openai")

    def count(self, job: Job, tries: Tries) -> None:
        """Counts a stream that is over, or broke for the first time: whether it could go on elsewhere, or why not."""
        if tries.seam is None:
            why_not = tries.sent.why_lost if tries.sent is not None else job.not_resumed or "off"
            self._metrics.streams.inc(_label(why_not) if why_not else "yes")

    async def next(self, job: Job, tries: Tries, reply: Reply) -> Job | None:
        """The request for the rest of a stream of `job` that broke, or broke again. None if only its end is missing.
        It comes when the stream may go on. Raises NotResumable."""
        try:
            found = await self._next(job, tries)
        except NotResumable as error:
            self.settle(reply, "none", f"not resumable: {error.reason}", error.reason)
            raise
        if found is None or tries.seam is None:
            self.settle(reply, "closed")
            return None
        tries.seam.goes_on(found)
        tries.go_on()
        return _rest_of(job, found)

    def settle(self, reply: Reply, how: str, why_not: str = "", reason: str = "") -> None:
        """Counts how a stream that broke goes on, and notes it in its record: once for each break, and not before
        another replica has begun the rest. `why_not` tells in words, and `reason` in one, why it does not. Does nothing
        if this is known already."""
        if not reply.resumed or "how" in (last := reply.resumed[-1]):
            return
        last["how"] = how
        if why_not:
            last["why_not"] = why_not
            self._metrics.resumptions.inc(how, _label(reason))
            return
        self._metrics.resumptions.inc(how, last["why"] if last["why"] in _BROKE else "other")
        _log.info("a stream goes on elsewhere", request_id=reply.request_id, **last)

    async def _turn(self, tries: Tries) -> None:
        """Waits until this stream may go on: not long, unless a large part of its pool died. Without the store, not at
        all: then nobody knows of the others."""
        if tries.last is not None:
            with suppress(StoreError):
                await asyncio.sleep(await turn_s(tries.last.pool.run))

    def may_go_on(self, job: Job, tries: Tries) -> bool:
        """Whether a stream of `job` could go on elsewhere now. Changes nothing."""
        try:
            seam, document = self._read(job, tries)
            if self._lacks_text(seam, asked := self._asked(job, seam, document)) and not seam.grammar.is_chat:
                continuation(asked, seam.progress)
        except NotResumable:
            return False
        return True

    async def _next(self, job: Job, tries: Tries) -> Continuation | None:
        seam, document = self._read(job, tries)
        if tries.seam is None and tries.sent is not None:
            tries.seam = seam
            tries.sent.lose("read")
        seam.broke()
        asked = self._asked(job, seam, document)
        lacks_text = self._lacks_text(seam, asked)
        if seam.grammar.is_chat:
            return await self._by_chat(job, tries, seam, asked, seam.grammar.other_chat(document))
        found = continuation(asked, seam.progress) if lacks_text else None
        if found is not None:
            await self._turn(tries)
        return found

    async def _by_chat(
        self, job: Job, tries: Tries, seam: Seam, asked: Asked, other: dict[str, Any] | None
    ) -> Continuation | None:
        """The rest of a stream that has told no token ids."""
        progress, left = seam.progress, tries.ticket.replica
        if progress.has_usage:
            return None
        await self._turn(tries)
        text = {"prompt": progress.text, "add_special_tokens": False}
        progress.was_cut(await self._text_tokens.of(job, text, left))
        if self._lacks_text(seam, asked):
            if other is not None:
                asked = await self._rendered(job, asked, other, left)
            return continuation(asked, progress)
        progress.parts = min(progress.parts, asked.most_tokens or progress.parts)
        progress.prompt_tokens = progress.prompt_tokens or await self._prompt_tokens(job, asked, left)
        return None

    async def _rendered(self, job: Job, asked: Asked, other: dict[str, Any], left: str) -> Asked:
        """This chat, or the other one if the model's template refuses it."""
        try:
            await self._prompt_tokens(job, asked, left)
        except NotResumable:
            return replace(asked, document=other)
        return asked

    async def _prompt_tokens(self, job: Job, asked: Asked, left: str) -> int:
        """Of a chat. Raises NotResumable."""
        prompt = {name: asked.document[name] for name in _OF_PROMPT if name in asked.document}
        return len(await self._text_tokens.of(job, prompt, left))

    def _read(self, job: Job, tries: Tries) -> tuple[Seam, dict[str, Any]]:
        """What the client has got, and what it has asked for."""
        if not self._settings.enabled:
            raise NotResumable("off")
        document = parse_document(job.body) if not job.not_resumed else {}
        return tries.seam or _seam(job, tries, document), document

    def _asked(self, job: Job, seam: Seam, document: dict[str, Any]) -> Asked:
        is_plain = not job.images and (not job.has_tools or document.get("tool_choice") == "none")
        is_chat = seam.grammar.is_chat
        endpoint, body = (ENDPOINTS[CHAT], _as_chat(seam, document)) if is_chat else (job.endpoint, document)
        return Asked(endpoint, body, job.route.served.longest_tokens, is_plain)

    def _lacks_text(self, seam: Seam, asked: Asked) -> bool:
        """Whether more than the end of a stream is missing. Raises NotResumable if it may not go on."""
        progress = seam.progress
        if why := seam.why_lost or ("tool_calls" if seam.calls_tools else ""):
            raise NotResumable(why)
        if seam.times >= self._settings.max_resumptions:
            raise NotResumable("max_resumptions")
        if seam.short_runs >= _MAX_SHORT_RUNS:  # the prompt itself may be what breaks engines
            raise NotResumable("short_runs")
        if progress.tokens > self._settings.max_tokens:
            raise NotResumable("length")
        most_tokens = asked.most_tokens
        if not progress.finish_reason and (most_tokens is None or progress.tokens < most_tokens):
            return True
        if seam.lacks_usage and not (progress.prompt_ids or seam.grammar.is_chat):
            raise NotResumable("usage")
        return False


def _label(reason: str) -> str:
    """Of a metric: why a stream could not go on."""
    return reason if reason in _NOT else "field"


def _as_chat(seam: Seam, document: dict[str, Any]) -> dict[str, Any]:
    try:
        return seam.grammar.chat(document)
    except (LookupError, TypeError, AttributeError):
        raise NotResumable("messages") from None


def _seam(job: Job, tries: Tries, document: dict[str, Any]) -> Seam:
    """Reads what the client has got. Raises NotResumable."""
    if tries.sent is None:
        raise NotResumable(job.not_resumed if job.stream else "no_stream")
    grammar = grammar_of(job.endpoint, job.model or "")
    read(tries.sent, grammar)
    options = document.get("stream_options")
    wants_usage = isinstance(options, dict) and is_true(options.get("include_usage")) and not job.strip_usage
    return Seam(grammar, wants_usage)


def _rest_of(job: Job, found: Continuation) -> Job:
    """The request for the rest: a job like the first one, with another body. Its prompt's keys are those of the first
    one's."""
    return job._replace(
        path=found.path,
        endpoint=endpoint_of(found.path),
        target=found.path,
        route=job.route.for_rest(),
        body=found.body,
        model_at=None,
        strip_usage=False,
        is_usage_open=False,
        wants_token_ids=found.is_exact or found.path == CHAT,  # so nobody takes out what its body asks for
        asks_ids=False,
    )
