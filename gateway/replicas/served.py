"""The models that are served, by name, as the replicas list them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.engine.facts import base_card
from gateway.replicas.member import Member


@dataclass(frozen=True, slots=True)
class Served:
    """A served model name: the pool behind it, and what enters the prompt's root."""

    pool: str
    root_model: str
    adapter: str | None
    replicas: dict[str, str]
    """Where the replicas that serve it are, as this gateway is configured or has found out: nobody who can write to
    the store can send prompts elsewhere."""
    apart: dict[str, str] = field(default_factory=dict)
    """The lives of those whose id means another engine in the store: see `identity`."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Those among which the store may choose."""
        if not self.apart:
            return tuple(self.replicas)
        return tuple(name for name in self.replicas if name not in self.apart)


def index(members: Iterable[Member]) -> dict[str, Served]:
    """What these replicas serve."""
    names: dict[str, Served] = {}
    for member in sorted(members, key=lambda each: each.id):
        base = base_card(member.cards)
        for card in member.cards:
            assert base is not None
            adapter = card.id if card.parent is not None else None
            known = names.get(card.id)
            if known is None or known.pool != member.pool:
                known = Served(member.pool, base.root, adapter, {})
            replicas = {**known.replicas, member.id: member.url}
            apart = {**known.apart, member.id: member.facts.started} if member.identity.is_left else known.apart
            names[card.id] = Served(member.pool, base.root, adapter, replicas, apart)
    return names
