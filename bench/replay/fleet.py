"""The simulated replicas of a replay: their number, their caches and their speed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import running_replicas
from bench.load import BLOCK_TOKENS, MODEL
from bench.replay.prompts import findable_tokens, longest_tokens, sent_tokens
from bench.replay.trace import Trace
from bench.routing.fleets import DECODE_S_PER_TOKEN, PREFILL_TOKENS_PER_S, Fleet

_STEP_TOKENS = 8192
"""The most tokens that an engine computes in one step, before scaling. It is the simulator's default."""


@dataclass(frozen=True)
class Setup:
    """A fleet for a trace."""

    replicas: int
    held: float
    """How many times all caches together hold the trace's distinct blocks."""
    tokens_scale: float
    """The tokens of the replay divided by those of the recording. Engines compute as many fewer tokens in a second, so
    all times stay the same."""
    rate: float
    """The rate of requests, divided by the recorded one."""
    speed: float
    """Divides all times, those of the recording and of the engines."""

    @property
    def prefill_tokens_per_s(self) -> float:
        return PREFILL_TOKENS_PER_S * self.tokens_scale

    @property
    def decode_s_per_token(self) -> float:
        return DECODE_S_PER_TOKEN / self.tokens_scale

    def capacity_tokens(self, trace: Trace) -> int:
        """The cache of each replica, in whole blocks of its engine."""
        tokens = self.held * trace.distinct_blocks * trace.block_tokens / self.replicas
        return int(tokens) // BLOCK_TOKENS * BLOCK_TOKENS

    def refusal(self, trace: Trace) -> str:
        """Why these caches cannot serve the trace. Empty if they can."""
        capacity_tokens, longest = self.capacity_tokens(trace), longest_tokens(trace.requests)
        if capacity_tokens >= longest:
            return ""
        return (
            f"{self.replicas} replicas with {self.held:g} of the blocks: each holds {capacity_tokens} tokens, and the "
            f"longest request has {longest}; replay more requests, or use fewer replicas or larger caches"
        )


def prefill_load(trace: Trace, replicas: int, tokens_scale: float) -> tuple[float, float]:
    """The share of the engines' time that prefill takes at the recorded rate: with one endless cache, and without any
    cache. From 1 on, queues grow."""
    tokens = sum(map(sent_tokens, trace.requests))
    most_tokens = trace.span_s * replicas * PREFILL_TOKENS_PER_S * tokens_scale
    return (tokens - findable_tokens(trace)) / most_tokens, tokens / most_tokens


def setup(
    trace: Trace, replicas: int, held: float, tokens_scale: float, busy: float, rate: float | None, per_s: float
) -> Setup:
    """A fleet for a scaled trace. Requests come at `rate` times the recorded rate, or so often that prefill with an
    endless cache keeps the engines busy for this share of the time. Time is scaled so that this machine sends `per_s`
    requests a second."""
    rate = rate or busy / prefill_load(trace, replicas, tokens_scale)[0]
    return Setup(replicas, held, tokens_scale, rate, per_s * trace.span_s / len(trace.requests) / rate)


@contextmanager
def running_fleet(setup: Setup, trace: Trace) -> Iterator[Fleet]:
    """New replicas with empty caches."""
    arguments = {
        "--speed": setup.speed,
        "--num-gpu-blocks": setup.capacity_tokens(trace) // BLOCK_TOKENS,
        "--max-num-batched-tokens": max(BLOCK_TOKENS, round(_STEP_TOKENS * setup.tokens_scale)),
        "--prefill-tokens-per-s": setup.prefill_tokens_per_s,
        "--decode-s-per-token": setup.decode_s_per_token,
    }
    flat = tuple(str(part) for pair in arguments.items() for part in pair)
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        running_replicas(Path(folder), setup.replicas, flat) as replicas,
    ):
        yield Fleet("simulated", {replica.id: replica.url for replica in replicas}, MODEL, BLOCK_TOKENS, setup.speed)
