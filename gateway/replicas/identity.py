"""Whether the registry means the engine that this gateway reaches by a replica's id, or another one.

Two clusters on one Redis may have the same ids, and no namespace. Each would register its engines over the other's,
again and again. Each time, what is known of the replica would be void. So a gateway leaves the id to the other engine:
- at another address, while an agent follows it, or while another gateway that does the pool's chores finds it alive;
- at the same address, when this gateway has registered over it once. There it looks like its own before a restart.
The gateway then serves its own engine apart: by hashing, and without a word to the store. No map is wrong then, and no
request fails. It registers its own again once no other gateway has done the pool's chores for a while.

An engine that has restarted lives another life at the same address. One that has moved lives another life at another
address, and what followed the old one is gone, or goes while the gateways are given the new address. One engine that is
reached at several addresses lives one life. Engines that do not tell when they started are not told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.registry import ReplicaRecord

Verdict = Literal["ours", "take", "leave"]
"""The registry means this gateway's engine; another one, over which this one is to be registered; or another one whose
the id is."""


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """What a gateway knows of a replica that it uses, and of its record."""

    started: str
    """When its engine started, as that tells itself: the name of its life. Empty where it never told."""
    url: str
    is_alive: bool
    known: ReplicaRecord | None
    is_followed: bool = False
    """Whether an agent has the lease on the life that is registered."""
    is_opposed: bool = False
    """Whether another gateway does the pool's chores: it registers its own engines whatever stands there."""


@dataclass(slots=True)
class Identity:
    """Of one replica. The clock is passed in."""

    verdict: Verdict = "ours"
    _facts: IdentityFacts | None = None
    _replaced: str = ""
    """The life over which this gateway registered its own last. Engines do not come back in a life that is over."""
    _foreign_since_s: float | None = None
    _unopposed_since_s: float | None = None

    @property
    def is_left(self) -> bool:
        """Whether the id is another engine's, for all that this gateway says to the store."""
        return self.verdict == "leave"

    def judge(self, facts: IdentityFacts, now_s: float, patience_s: float) -> Verdict:
        """Look at new facts. Nobody is taken to keep the other engine registered once nobody else has done the pool's
        chores for `patience_s`: this gateway does none while it leaves the id."""
        self._facts = facts
        known = facts.known
        if known is None or not _tells_lives_apart(facts.started, known) or known.incarnation == facts.started:
            self.verdict = "ours"
            self._foreign_since_s = self._unopposed_since_s = None
            return self.verdict
        if self._foreign_since_s is None:
            self._foreign_since_s = now_s
        if facts.is_opposed:
            self._unopposed_since_s = None
        elif self._unopposed_since_s is None:
            self._unopposed_since_s = now_s
        is_given_up = self._unopposed_since_s is not None and now_s - self._unopposed_since_s >= patience_s
        is_kept = not is_given_up and (self.is_left or known.incarnation == self._replaced)
        if not facts.is_alive:  # dying is not another life
            self.verdict = "leave" if self.is_left else "ours"
        elif is_kept or (known.url != facts.url and _is_used(facts, known)):
            self.verdict = "leave"
        else:
            self.verdict, self._replaced = "take", known.incarnation
        return self.verdict

    def finding(self, now_s: float, patience_s: float) -> str:
        """In words, where the id has been another engine's for longer than a restart or a move takes; else empty."""
        if not self.is_left or self._foreign_since_s is None or now_s - self._foreign_since_s < patience_s:
            return ""
        ours = self._facts
        if ours is None or ours.known is None:
            return ""
        known = ours.known
        return (
            f"the registry means another engine by this id, at {known.url} (started {known.incarnation}); here it is "
            f"at {ours.url} (started {ours.started}), and served without the store: give clusters that share a Redis a "
            "redis.namespace each, and all gateways of one cluster the same replicas"
        )


def _is_used(facts: IdentityFacts, known: ReplicaRecord) -> bool:
    """Whether somebody means the engine that is registered: an agent, or those who found it alive."""
    return facts.is_followed or (facts.is_opposed and known.state != "dead")


def _tells_lives_apart(started: str, known: ReplicaRecord) -> bool:
    return bool(started) and not known.incarnation.startswith("life-")
