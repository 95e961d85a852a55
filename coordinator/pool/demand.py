"""What a pool is asked for now, and what it has: for autoscalers, metrics and people.

Everything is exact over all gateways, because it is read from what they share. Requests that gateways hold until a
replica is ready come with their heartbeats, so they are at most half a second old.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class Held:
    """The requests that one gateway holds until a replica of the pool is ready."""

    requests: int = 0
    tokens: int = 0
    """Of their prompts."""

    @property
    def text(self) -> str:
        """As a heartbeat takes it."""
        return f"{self.requests} {self.tokens}" if self.requests else ""


@dataclass(frozen=True, slots=True)
class Line:
    """The requests of one band that wait in one queue."""

    band: int
    queue: str
    requests: int
    tokens: int
    """Prompt tokens that they have to compute, as estimated when they came."""
    oldest_s: float
    """How long the one has waited that has waited longest."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A pool's demand at one moment."""

    ready_replicas: int
    draining_replicas: int
    running_requests: int
    """Those in flight on replicas."""
    running_tokens: int
    """Their prompt tokens that are not computed yet."""
    prefill_tokens_per_s: int
    """What the ready replicas compute together."""
    held_requests: int
    """Those that wait until any replica is ready."""
    held_tokens: int
    lines: tuple[Line, ...]

    @property
    def waiting_requests(self) -> int:
        """Those that wait for room, and those that are held."""
        return self.held_requests + sum(line.requests for line in self.lines)

    @property
    def waiting_tokens(self) -> int:
        return self.held_tokens + sum(line.tokens for line in self.lines)

    @property
    def work_s(self) -> float | None:
        """How long the ready replicas need for the prompts that run and wait; None if none is ready."""
        tokens = self.running_tokens + self.waiting_tokens
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else None

    @property
    def oldest_wait_s(self) -> float:
        """How long the request has waited for room that has waited longest; 0 if none waits."""
        return max((line.oldest_s for line in self.lines), default=0.0)


def sum_of(demands: Sequence[Demand]) -> Demand:
    """The demand of several pools together; there is at least one."""
    names = [each.name for each in fields(Demand) if each.name != "lines"]
    totals = {name: sum(getattr(demand, name) for demand in demands) for name in names}
    return Demand(**totals, lines=tuple(line for demand in demands for line in demand.lines))


async def read_demand(run: Callable[..., Awaitable[Any]], prefill_tokens_per_s: float) -> Demand:
    """Read a pool's demand. `run` is that of the pool; `prefill_tokens_per_s` is that of a replica whose rate is not
    measured. Raises StoreError."""
    reply = await run("demand", prefill_tokens_per_s=prefill_tokens_per_s)
    now_ms, ready, draining, requests, tokens, rate, held, held_tokens, flat = reply
    lines = tuple(
        Line(int(band), queue.decode("utf-8", "replace"), seats, waiting, max(0, now_ms - since_ms) / 1000)
        for band, queue, seats, waiting, since_ms in zip(*(flat[at::5] for at in range(5)), strict=True)
    )
    return Demand(ready, draining, requests, tokens, rate, held, held_tokens, lines)
