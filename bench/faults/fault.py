"""A fault: a sentence that describes it, a function that causes it on a stage, and its goals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from bench.faults.stage import Layout, Stage

LASTS_S = 12.0
"""The duration of a fault that lasts."""
RESTARTS_AFTER_S = 1.0
"""The time in which a supervisor sees that a process has died and starts it again."""
LATE_AFTER_S = 5.0
PLAIN = Layout()
Inflict = Callable[[Stage], Awaitable[None]]
"""Causes the fault. Returns when the fault is over."""


class Component(Enum):
    """The component that fails. It sets the goal in seconds until decisions are exact again, if there is one."""

    NONE = "nothing"
    GATEWAY = "gateway"
    REPLICA = "replica"
    AGENT = "agent"
    REDIS = "Redis"
    LINK = "link"
    ALL = "everything"

    @property
    def right_within_s(self) -> float | None:
        return {"nothing": 2.0, "replica": None, "link": None, "Redis": 2.0}.get(self.value, 5.0)

    @property
    def is_of_many_gateways(self) -> bool:
        """Whether more gateways than two make a difference."""
        return self in (Component.NONE, Component.GATEWAY, Component.REDIS, Component.ALL)


@dataclass(frozen=True, slots=True)
class Fault:
    component: Component
    sentence: str
    inflict: Inflict
    layout: Layout = PLAIN
    counts_from_strike: bool = False
    """Whether the time until all is right again starts at the fault's start. Otherwise it starts at the fault's end."""
    right_within_s: float | None = None
    """The goal, if it differs from the component's."""
    late_after_s: float = LATE_AFTER_S
    is_of_the_queue: bool = False
    """Whether it strikes waiting requests and nothing else."""
    loses_load: bool = False
    """Whether Redis forgets requests that still run. Then replicas may have more than their cap for a while."""

    @property
    def goal_s(self) -> float | None:
        return self.component.right_within_s if self.right_within_s is None else self.right_within_s


async def nothing(_: Stage) -> None:
    await asyncio.sleep(LASTS_S)
