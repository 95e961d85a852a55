"""What the engine says it had cached, against what was predicted: the feedback that keeps the map honest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.errors import StoreError
from coordinator.worker import forget_older
from gateway.metrics import Metrics
from gateway.routing.router import Ticket
from gateway.tasks import Tasks

_MISS_TOKENS = 64
"""A shortfall below this is a block's rounding, or the estimate's error."""


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


class Audit:
    """Compares, counts, and corrects."""

    def __init__(self, metrics: Metrics, tasks: Tasks) -> None:
        self._metrics = metrics
        self._tasks = tasks
        self._reporting: dict[str, str] = {}
        """The incarnation of each replica that reported cached tokens last, where one ever did."""

    def observe(self, ticket: Ticket, usage: Usage) -> None:
        """Count one answer; where the engine had evicted what the map promised, correct the map."""
        replica, predicted = ticket.replica, ticket.matched_tokens
        self._metrics.prompt_tokens.labels(replica).inc(usage.prompt_tokens)
        if usage.cached_tokens is not None and usage.omits_zero:  # a response's usage has the field in any case
            self._reporting[replica] = ticket.incarnation
        cached = known_cached_tokens(usage, self._reporting.get(replica) == ticket.incarnation)
        if cached is None:
            return
        self._metrics.cached_tokens.labels(replica).inc(cached)
        if ticket.placement is None:
            return
        self._metrics.predicted_tokens.labels(replica).inc(predicted)
        error = predicted - cached
        direction = "over" if error > 0 else "under"
        self._metrics.prediction_error_tokens.labels(direction).observe(abs(error))
        if is_eviction(predicted, cached) and ticket.placement.touch:
            self._tasks.spawn(_forget(ticket), "forget evicted")


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
