"""What the engine says it had cached, against what was predicted: the feedback that keeps the map honest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator.chores.worker import forget_older
from coordinator.errors import StoreError
from coordinator.pool.engine_feedback import ask_reset, credit, is_unchanged
from coordinator.scripts import Placement
from gateway.metrics.gateway_metrics import Metrics
from gateway.routing.ticket import Ticket
from gateway.tasks import Tasks

_log = structlog.get_logger("kvgate.audit")

_MISS_TOKENS = 64
"""A shortfall below this is a block's rounding, or the estimate's error."""
_IN_FLIGHT_MS = 10_000
"""A claim made so recently may still have been waiting for its prefill."""
_TOLD_S = 4.0
"""Events tell of an eviction within this time, or never: who reads or applies them and stands still for longer has
lost his lease."""
_DOUBTS = 3
_DOUBT_S = 60.0
"""So many different keys that were not there within this time, and a replica's events are started anew."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt tokens of one answer; `cached_tokens` is None where the answer does not say."""

    prompt_tokens: int
    cached_tokens: int | None
    omits_zero: bool = False
    """Whether an engine that reports cached tokens leaves them out of such an answer when there were none."""


def read_usage(usage: Any) -> Usage | None:
    """Usage in OpenAI's chat form, in that of its responses, or in Anthropic's."""
    if not isinstance(usage, dict):
        return None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    if not isinstance(prompt, int):
        return None
    cached = usage.get("cache_read_input_tokens")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict):
            cached = details.get("cached_tokens")
    # Chat and text completions do; messages and pooling answers never tell, responses always do.
    omits_zero = "prompt_tokens" in usage and bool(usage.get("completion_tokens"))
    return Usage(prompt, cached if isinstance(cached, int) else None, omits_zero)


def known_cached_tokens(usage: Usage, replica_reports: bool) -> int | None:
    """What was cached; None where that cannot be told. vLLM leaves a zero out, as it leaves out what it is not asked
    to report: only of a replica that is known to report does the absence mean a complete miss."""
    if usage.cached_tokens is None and usage.omits_zero and replica_reports:
        return 0
    return usage.cached_tokens


def cause_of(ticket: Ticket, cached_tokens: int, block_tokens: int, is_current_life: bool) -> str:
    """Why a prediction was wrong; empty where it was right, that is within a block of what the map could know: no less
    than the matched key, no more than the chain's next one."""
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
        if placement.is_exact:
            return "never_computed"
    return "evicted"


class Audit:
    """Compares, counts, and corrects."""

    def __init__(self, metrics: Metrics, tasks: Tasks, block_tokens: Callable[[str], int]) -> None:
        self._metrics = metrics
        self._tasks = tasks
        self._block_tokens = block_tokens
        self._reporting: dict[str, str] = {}
        """The incarnation of each replica that reported cached tokens last, where one ever did."""
        self._doubts: dict[str, dict[str, float]] = {}
        """By replica: keys that were not there, and when that was seen."""

    def observe(self, ticket: Ticket, usage: Usage) -> None:
        """Count one answer; where the engine had more or less than the map promised, correct the map."""
        replica, predicted = ticket.replica, ticket.matched_tokens
        self._metrics.prompt_tokens.inc(replica, by=usage.prompt_tokens)
        if usage.cached_tokens is not None and usage.omits_zero:  # a response's usage has the field in any case
            self._reporting[replica] = ticket.incarnation
        cached = known_cached_tokens(usage, self._reporting.get(replica) == ticket.incarnation)
        if cached is None:
            return
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

    def _repair(self, ticket: Ticket, placement: Placement, cause: str, cached: int) -> None:
        if cause == "untold" and placement.is_exact:
            credit(ticket.pool, ticket.request, placement, cached)
        elif cause == "evicted" and is_eviction(ticket.matched_tokens, cached):
            if placement.matched_kind == "resident" and placement.is_exact:
                self._tasks.spawn(self._doubt(ticket, placement), "doubt residency")
            elif placement.touch and placement.last_use_ms < placement.placed_ms:  # else the clock went back since
                self._tasks.spawn(_forget(ticket), "forget evicted")

    async def _doubt(self, ticket: Ticket, placement: Placement) -> None:
        """An eviction may have been on its way; if no event tells of one, the events cannot be trusted any more."""
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
        if len(doubts) >= _DOUBTS:  # one may be a request of a kind that reads no cache
            doubts.clear()
            ask_reset(ticket.pool, ticket.replica)


def is_eviction(predicted_tokens: int, cached_tokens: int) -> bool:
    """Whether so much is missing that the engine must have dropped it: estimates are never that wrong."""
    return cached_tokens < predicted_tokens / 2 and predicted_tokens - cached_tokens >= _MISS_TOKENS


async def _forget(ticket: Ticket) -> None:
    """The matched key had not been used for 10 s and more, and was gone: so is, in an LRU cache, whatever was used
    before it. (The key itself has just been computed again.)"""
    assert ticket.placement is not None
    try:
        await forget_older(ticket.pool, ticket.replica, ticket.placement.last_use_ms)
    except StoreError:
        return
