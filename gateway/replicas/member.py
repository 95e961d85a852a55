"""A replica as this gateway knows it: where it is, what it said of itself, and whether it answers."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from coordinator.engine.facts import EngineFacts, ModelCard
from coordinator.registry import ReplicaRecord
from gateway.replicas.identity import Identity

_LIVES = re.compile(r"life-(\d{1,15})")


@dataclass(slots=True)
class Member:
    """A replica as this gateway knows it."""

    id: str
    url: str
    dp_rank: int | None = None
    cards: list[ModelCard] = field(default_factory=list)
    pool: str = ""
    facts: EngineFacts = field(default_factory=EngineFacts)
    alive: bool = False
    failures: int = 0
    problem: str = "not reached yet"
    answers: bool = False
    """Whether it answered this gateway when it was asked last."""
    asked_s: float = 0.0
    answered_s: float = field(default_factory=time.monotonic)
    """When it answered last, or was first heard of."""
    lacks_metrics: bool = False
    """Whether it did not answer when it was last asked for its metrics: `facts` may be those of an earlier life."""
    identity: Identity = field(default_factory=Identity)
    check: asyncio.Task[None] | None = None
    """It is being asked whether it lives, until this is done."""

    def incarnation(self, known: ReplicaRecord | None) -> str:
        """Its engine's start time; where it does not tell, a count that goes up when it comes back from the dead."""
        if known is not None and (not self.alive or self.lacks_metrics):
            return known.incarnation  # dying is not another life
        if self.facts.started:
            return self.facts.started
        lives = _LIVES.fullmatch(known.incarnation) if known is not None else None
        if known is None or lives is None:
            return "life-1"
        return f"life-{int(lives[1]) + (self.alive and known.state == 'dead')}"
