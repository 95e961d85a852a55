"""The light replicas of a replay: their number, their caches and their speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.embedded import embedded_redis
from bench.fleet.replicas import light_replicas
from bench.fleet.settings import LightSettings
from bench.load import BLOCK_TOKENS, MODEL
from bench.replay.prompts import findable_tokens, longest_tokens, sent_tokens
from bench.replay.trace import Trace
from bench.routing.fleets import DECODE_S_PER_TOKEN, PREFILL_TOKENS_PER_S, Fleet

CONFIG = {
    # The engines' queues hold the requests of an overloaded fleet, not the gateways.
    "limits": {"max_in_flight": 65_536},
    # A long prompt takes half a minute. vLLM's events tell of every step meanwhile, but a light replica's do not.
    # One process answers for all replicas, so it may answer late.
    "health": {"hang_s": 300, "timeout_s": 5},
}
_CHUNK_TOKENS = 32
"""The tokens of the recording in one chunk of a stream, after the first token. Chunks of one token would cost this
machine more than everything else."""


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
    prefills: int | None = None
    """Replicas that only compute prompts. 0: all replicas do everything. None: light replicas, which have no roles."""

    @property
    def decode_s_per_token(self) -> float:
        return DECODE_S_PER_TOKEN / self.tokens_scale

    @property
    def first_token_excess_s(self) -> float:
        """How much longer the first token takes than in the recording's tokens, because a scaled token stands for
        several. Not divided by `speed`. A simulated replica's first token comes with the last of the prompt."""
        return 0.0 if self.prefills is not None else self.decode_s_per_token - DECODE_S_PER_TOKEN

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
    trace: Trace,
    replicas: int,
    held: float,
    tokens_scale: float,
    busy: float,
    rate: float | None,
    per_s: float,
    prefills: int | None = None,
) -> Setup:
    """A fleet for a scaled trace. Requests come at `rate` times the recorded rate, or so often that prefill with an
    endless cache keeps the engines busy for this share of the time. Time is scaled so that this machine sends `per_s`
    requests a second."""
    rate = rate or busy / prefill_load(trace, replicas, tokens_scale)[0]
    speed = per_s * trace.span_s / len(trace.requests) / rate
    return Setup(replicas, held, tokens_scale, rate, speed, prefills)


@contextmanager
def running_fleet(setup: Setup, trace: Trace) -> Iterator[Fleet]:
    """New replicas with empty caches, and a new Redis to which their agents publish."""
    settings = LightSettings(
        served_name=MODEL,
        block_tokens=BLOCK_TOKENS,
        num_blocks=setup.capacity_tokens(trace) // BLOCK_TOKENS,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S * setup.tokens_scale,
        decode_s_per_token=setup.decode_s_per_token,
        speed=setup.speed,
        tokens_per_chunk=max(1, round(_CHUNK_TOKENS * setup.tokens_scale)),
    )
    with embedded_redis() as redis_url, light_replicas(setup.replicas, settings, redis_url) as replicas:
        yield Fleet("light", replicas.urls, MODEL, BLOCK_TOKENS, setup.speed, redis_url, CONFIG)
