"""One replica as a gateway knows it."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from coordinator.engine.facts import EngineFacts, ModelCard
from coordinator.registry import ReplicaRecord
from gateway.replicas.identity import Identity
from gateway.replicas.told_role import ToldRole
from gateway.settings.base import ROLE_LABEL

_LIVES = re.compile(r"life-(\d{1,15})")
CHANGING = "changing"
"""Shown in the place of a role while there is none."""


@dataclass(slots=True)
class Member:
    """A replica as this gateway knows it."""

    id: str
    url: str
    dp_rank: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    """Those that the configuration, or the source that found it, gives it."""
    cards: list[ModelCard] = field(default_factory=list)
    pool: str = ""
    facts: EngineFacts = field(default_factory=EngineFacts)
    alive: bool = False
    failures: int = 0
    """Failed checks in a row."""
    problem: str = "not reached yet"
    is_answering: bool = False
    """Whether it answered the last check by this gateway."""
    is_silent: bool = False
    """Whether the last check failed because no answer came in time, and no connection was refused or reset. Its server
    may be alive, and busy with one request."""
    heard_dead: int = 0
    """Good checks in a row that began while the registry had it as dead."""
    called_dead: str = ""
    """Its incarnation that the registry had as dead since this gateway heard it last; empty if it had none."""
    overruled_until_s: float = 0.0
    """Until then the word of another gateway counts: that one hears the replica, and this gateway does not."""
    checked_s: float = 0.0
    answered_s: float = field(default_factory=time.monotonic)
    """When it last answered, or when this gateway first learned of it."""
    tells_sleep: bool = True
    """Whether its engine has /is_sleeping, as far as this gateway knows."""
    is_asleep: bool = False
    """Whether it was asleep when this gateway last knew."""
    tokens_per_s: float = 0.0
    """How fast its engine generates the tokens of one sequence, when it was measured last; 0 if it does not tell."""
    lacks_metrics: bool = False
    """Whether its /metrics could not be read last time. `facts` may then be those of an earlier incarnation."""
    told_role: ToldRole | None = None
    """Its server's word on its role; None if it has none."""
    was_asked_role: bool = False
    """Whether its server was asked for that since it may have started."""
    takes_media: bool = False
    """Whether it has answered a prompt with images or other media."""
    forces_usage: bool | None = None
    """Whether it ends each stream with its usage, asked or not (vLLM's --enable-force-include-usage). None if no stream
    has told."""
    reads_again: bool = False
    """Whether its models are to be read again: it refused a request for one that it had listed."""
    identity: Identity = field(default_factory=Identity)
    check: asyncio.Task[None] | None = None
    """The health check that runs, or ran last."""

    @property
    def role(self) -> str:
        """What it is for: see Role in gateway/settings/base.py. The server's word goes before the label: it refuses
        whatever does not suit its role. Empty while it takes nothing, because its role changes."""
        if self.told_role is not None:
            return self.told_role.role if self.told_role.is_ready else ""
        return self.labels.get(ROLE_LABEL, "both")

    @property
    def is_decode_only(self) -> bool:
        """Whether its server takes no request without a KV cache that another one has computed."""
        return self.told_role is not None and self.role == "decode"

    @property
    def labels_in_force(self) -> dict[str, str]:
        """Its labels, with the role that it has now."""
        return self.labels if self.told_role is None else self.labels | {ROLE_LABEL: self.role or CHANGING}

    def is_overruled(self, now_s: float) -> bool:
        """Whether another gateway hears it, and this one does not."""
        return now_s < self.overruled_until_s

    def incarnation(self, known: ReplicaRecord | None) -> str:
        """Its engine's start time. If that is unknown: `life-<n>`, where n rises when a dead replica is back."""
        if known is not None and (not self.alive or self.lacks_metrics):
            return known.incarnation  # its start time may be out of date
        if self.facts.started:
            return self.facts.started
        lives = _LIVES.fullmatch(known.incarnation) if known is not None else None
        if known is None or lives is None:
            return "life-1"
        return f"life-{int(lives[1]) + (self.alive and known.state == 'dead')}"


def is_same_life(one: str, other: str) -> bool:
    """Whether two incarnations may be the same run of an engine. Those without a start time are only counted: a replica
    that could not be reached for a while has a new one, too."""
    return one == other or bool(_LIVES.fullmatch(one) and _LIVES.fullmatch(other))
