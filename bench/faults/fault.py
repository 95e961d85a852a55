"""What a fault is: a sentence, what it does to a stage, and what is promised of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from bench.faults.stage import Layout, Stage

LASTS_S = 12.0
"""A fault that lasts."""
RESTARTS_AFTER_S = 1.0
"""A supervisor needs so long to see that a process has died, and to start it again."""
LATE_AFTER_S = 5.0
PLAIN = Layout()
Inflict = Callable[[Stage], Awaitable[None]]
"""Strikes; returns when the fault is over."""


class Component(Enum):
    """Whose faults they are; and within how many seconds decisions are to be exact again, where that is a goal."""

    NONE = "nothing"
    GATEWAY = "gateway"
    REPLICA = "replica"
    AGENT = "agent"
    COORDINATOR = "coordinator"
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
    """Whether the time until all is right again begins with the fault, not with its end."""
    right_within_s: float | None = None
    """Where it differs from the component's."""
    late_after_s: float = LATE_AFTER_S

    @property
    def goal_s(self) -> float | None:
        return self.component.right_within_s if self.right_within_s is None else self.right_within_s


async def nothing(_: Stage) -> None:
    await asyncio.sleep(LASTS_S)
