"""An engine's counters, for its /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; requests by how they finished (`stop`, `length`, `abort`)."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    external_queries_tokens: int = 0
    external_hits_tokens: int = 0
    preemptions: int = 0
    prefills: int = 0
    prefill_s: float = 0.0
    prefill_computed_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    """The time between a token and the one before it, summed over all tokens but the first of each answer."""
    blocks_stored: int = 0
    blocks_evicted: int = 0

    def prefilled(self, seconds: float, computed_tokens: int) -> None:
        """A request has finished. Its prefill of the uncached tokens took this long since it was scheduled."""
        self.prefills += 1
        self.prefill_s += seconds
        self.prefill_computed_tokens += computed_tokens
