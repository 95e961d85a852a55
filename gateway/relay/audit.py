"""Compares the tokens that an engine had cached with the prediction, and corrects the map where it was wrong."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from coordinator.errors import StoreError
from coordinator.maintenance.held_keys import forget_older
from coordinator.placement import Placement
from coordinator.pool.engine_feedback import ask_reset, is_unchanged, void
from gateway.metrics.gateway_metrics import Metrics
from gateway.routing.ticket import Ticket
from gateway.tasks import Tasks

_log = structlog.get_logger("kvgate.audit")

_MISS_TOKENS = 64
"""A smaller shortfall comes from rounding to blocks, or from the estimate of tokens."""
_MOST_TOKENS = 10**9
"""A larger count is a mistake of the engine, or a lie."""
_IN_FLIGHT_MS = 10_000
"""The prefill of a claim that is younger than this may not be over."""
_MAX_MISSED = 8192
_TOLD_S = 4.0
"""Events report an eviction within this time, or never: an agent that pauses for longer loses its lease."""
_DOUBTS = 3
_DOUBT_S = 60.0
"""After this many different missing keys within this time, the replica's agent starts anew."""


class Usage(NamedTuple):
    """Tokens of one answer. `cached_tokens` is None if the answer does not report them."""

    prompt_tokens: int
    cached_tokens: int | None
    omits_zero: bool = False
    """Whether this kind of answer omits the field if no token was cached, on an engine that reports cached tokens."""
    output_tokens: int = 0


def read_usage(usage: Any) -> Usage | None:
    """Reads usage in the form of OpenAI's chat, of OpenAI's responses, or of Anthropic's messages."""
    if not isinstance(usage, dict):
        return None
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    if prompt is None:
        return None
    cached = usage.get("cache_read_input_tokens")
    if "input_tokens" in usage:  # Anthropic's input tokens are those that the cache neither had nor took
        prompt += (_count(cached) or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict):
            cached = details.get("cached_tokens")
    # Chat and text completions omit a zero. Pooling never has the field, responses always have it.
    omits_zero = "prompt_tokens" in usage and bool(_count(usage.get("completion_tokens")))
    cached_tokens = _count(cached)
    if cached is not None and cached_tokens is None:
        omits_zero = False  # it was told, and cannot be read
    output_tokens = _count(usage.get("completion_tokens", usage.get("output_tokens"))) or 0
    return Usage(prompt, cached_tokens, omits_zero, output_tokens)


def _count(value: Any) -> int | None:
    """A number of tokens that an answer can have; None if it is none."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


def known_cached_tokens(usage: Usage, replica_reports: bool) -> int | None:
    """The tokens that were cached; None if that is not known. vLLM omits the field for a zero, and also if it is not
    configured to report it. So a missing field means a complete miss only for a replica that is known to report."""
    if usage.cached_tokens is None and usage.omits_zero and replica_reports:
        return 0
    return usage.cached_tokens


def cause_of(ticket: Ticket, cached_tokens: int, block_tokens: int, is_current_life: bool) -> str:
    """Why a prediction was wrong; empty if it was right. It is right if the cached tokens end between the matched key
    and the chain's next key, give or take a block."""
    placement = ticket.placement
    if placement is None:
        return ""
    if cached_tokens >= ticket.matched_tokens - block_tokens:
        is_known = cached_tokens <= ticket.matched_tokens or cached_tokens <= ticket.boundary_tokens + block_tokens
        return "" if is_known else "untold"
    if not is_current_life:
        return "restarted"
    if placement.matched_kind == "claim":
        age_ms = placement.placed_ms - placement.last_use_ms
        if age_ms < _IN_FLIGHT_MS:
            return "in_flight"
        if placement.is_told:
            return "never_computed"
    return "evicted"


class Audit:
    """Compares answers with predictions, counts the errors, and corrects the map."""

    def __init__(self, metrics: Metrics, tasks: Tasks, block_tokens: Callable[[str], int]) -> None:
        self._metrics = metrics
        self._tasks = tasks
        self._block_tokens = block_tokens
        self._reporting: dict[str, str] = {}
        """By replica: the last incarnation that reported cached tokens."""
        self._doubts: dict[str, dict[str, float]] = {}
        """By replica: keys that were missing, and when that was seen."""
        self._missed: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        """By replica and key, for keys that were not in its cache the last time: the entry that called the key resident
        (empty for a claim), and when it was first missed (Redis time, ms)."""

    def observe(self, ticket: Ticket, usage: Usage) -> int | None:
        """Counts one answer. If the engine had more or fewer tokens cached than predicted, corrects the map. Returns
        the tokens that were cached; None if that is not known."""
        replica = ticket.replica
        self._metrics.prompt_tokens.inc(replica, by=usage.prompt_tokens)
        if usage.cached_tokens is not None and usage.omits_zero:  # responses have the field in any case
            self._reporting[replica] = ticket.incarnation
        cached = known_cached_tokens(usage, self._reporting.get(replica) == ticket.incarnation)
        if cached is not None and not ticket.is_prefilled:  # else it is what the other replica had cached
            self._compare(ticket, cached)
        return cached

    def _compare(self, ticket: Ticket, cached: int) -> None:
        replica, predicted = ticket.replica, ticket.matched_tokens
        self._metrics.cached_tokens.inc(replica, by=cached)
        if ticket.placement is None:
            return
        self._metrics.predicted_tokens.inc(replica, by=predicted)
        error = predicted - cached
        direction = "over" if error > 0 else "under"
        self._metrics.prediction_error_tokens.observe(abs(error), direction)
        record = ticket.pool.records.get(replica)
        is_current = record is None or record.incarnation == ticket.incarnation
        cause = cause_of(ticket, cached, self._block_tokens(replica), is_current)
        if cause:
            self._metrics.wrong_predictions.inc(replica, cause)
            self._repair(ticket, ticket.placement, cause, cached)
        elif self._missed and ticket.placement.matched_keys:
            self._missed.pop(_matched(ticket, ticket.placement), None)

    def _repair(self, ticket: Ticket, placement: Placement, cause: str, cached: int) -> None:
        if cause == "untold" or not is_eviction(ticket.matched_tokens, cached):
            self._missed.pop(_matched(ticket, placement), None)
            if cause == "untold":
                ticket.had_tokens = cached
        elif cause != "restarted" and self._is_missed_again(ticket, placement):
            _log.warning("a prefix is missed again and again", replica=ticket.replica, state=ticket.state)
            ends = zip(ticket.request.keys, ticket.request.tokens, strict=True)
            keys = [key for key, end in list(ends)[: placement.matched_keys] if end > cached]
            void(ticket.pool, ticket.request, ticket.replica, keys)
        elif cause == "evicted":
            if placement.matched_kind == "resident" and placement.is_exact:
                self._tasks.spawn(self._doubt(ticket, placement), "doubt residency")
            elif placement.touch and placement.last_use_ms < placement.placed_ms:  # else the clock was set back
                self._tasks.spawn(_forget(ticket), "forget evicted")

    def _is_missed_again(self, ticket: Ticket, placement: Placement) -> bool:
        """Whether the replica has missed this prefix before, has computed it since, and still lacks it. An event that
        explains a miss gives the residency another entry, and a claim may be missed until its prompt is computed."""
        missed, entry = _matched(ticket, placement), placement.matched_entry
        known_entry, since_ms = self._missed.get(missed, (None, 0))
        if known_entry != entry:
            self._missed[missed] = (entry, placement.placed_ms)
            if len(self._missed) > _MAX_MISSED:
                self._missed.popitem(last=False)
            return False
        if placement.placed_ms - since_ms < (_TOLD_S * 1000 if entry else _IN_FLIGHT_MS):
            return False
        del self._missed[missed]
        return True

    async def _doubt(self, ticket: Ticket, placement: Placement) -> None:
        """Waits for an event that reports the eviction. Without one, the replica's events cannot be trusted."""
        await asyncio.sleep(_TOLD_S)
        key = ticket.request.keys[placement.matched_keys - 1]
        try:
            if not await is_unchanged(ticket.pool, ticket.replica, key, placement.matched_entry):
                return
        except StoreError:
            return
        now = time.monotonic()
        doubts = self._doubts.setdefault(ticket.replica, {})
        doubts[key] = now
        for old in [key for key, since in doubts.items() if since < now - _DOUBT_S]:
            del doubts[old]
        _log.warning("residency was not true", replica=ticket.replica, key=key)
        self._metrics.doubts.inc(ticket.replica)
        if len(doubts) >= _DOUBTS:  # a single one may be a request that does not read the cache
            doubts.clear()
            ask_reset(ticket.pool, ticket.replica)


def _matched(ticket: Ticket, placement: Placement) -> tuple[str, str]:
    """The replica and the deepest key that was predicted there; no key if none was."""
    return ticket.replica, ticket.request.keys[placement.matched_keys - 1] if placement.matched_keys else ""


def is_eviction(predicted_tokens: int, cached_tokens: int) -> bool:
    """Whether so much is missing that the engine must have evicted it. Estimates are never that wrong."""
    return cached_tokens < predicted_tokens / 2 and predicted_tokens - cached_tokens >= _MISS_TOKENS


async def _forget(ticket: Ticket) -> None:
    """Drops the keys that were last used before the matched key. The cache is LRU, and the matched key was evicted, so
    the older keys are gone too. (The matched key itself has just been computed again.)"""
    assert ticket.placement is not None
    try:
        await forget_older(ticket.pool, ticket.replica, ticket.placement.last_use_ms)
    except StoreError:
        return
