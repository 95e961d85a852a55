"""What a name of the configuration's `models` leads to: its backends with their weights, and its fallbacks. Pure.

An `Offer` is made anew when replicas or settings change, not for a request. A name that is not configured has none: the
pools that serve it share its requests by their ready replicas (docs/adr/0017-pools-of-a-name.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.engine.facts import ModelCard, base_card
from gateway.replicas.member import Member
from gateway.replicas.served import Backends, ServedModel, served_by
from gateway.settings.model_settings import BackendSettings, FallbackSettings, ModelSettings


@dataclass(frozen=True, slots=True)
class Option:
    """One backend of a model."""

    name: str
    weight: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A configured model."""

    model: str
    """Its name, whichever alias a client used."""
    options: dict[str, Option]
    """By name; empty if the configuration lists no backends."""
    is_sticky: bool
    """Whether a conversation stays with its backend."""
    fallback: tuple[FallbackSettings, ...]
    backends: tuple[BackendSettings, ...]

    def may_be(self, name: str, known: ServedModel) -> bool:
        """Whether a known model of this name may be one of the backends. The labels of its replicas are not known."""
        if not self.backends:
            return name == self.model
        return any(_may_match(self.model, each, name, known) for each in self.backends)


def offers_of(models: Sequence[ModelSettings]) -> dict[str, Offer]:
    """Name or alias → the offer."""
    found: dict[str, Offer] = {}
    for model in models:
        options = {each.name: Option(each.name, each.weight) for each in model.backends}
        is_sticky = model.session == "sticky"
        offer = Offer(model.name, options, is_sticky, tuple(model.fallback), tuple(model.backends))
        found |= dict.fromkeys((model.name, *model.aliases), offer)
    return found


def with_models(
    named: dict[str, Backends], models: Sequence[ModelSettings], members: Sequence[Member]
) -> dict[str, Backends]:
    """The names that the members serve, and those of the configuration. A configured name that has backends leads to
    these and no others."""
    served = dict(named)
    for model in models:
        backends = named.get(model.name, ())
        if model.backends:
            found = [_matching(model.name, each, members) for each in model.backends]
            backends = tuple(backend for some in found for backend in some)
        for name in (model.name, *model.aliases):
            served.pop(name, None)
            if backends:
                served[name] = backends
    return served


def _may_match(model: str, backend: BackendSettings, name: str, known: ServedModel) -> bool:
    """Whether a known model of this name may be this backend of the configured model."""
    wanted = backend.match
    if backend.pool not in (None, known.pool) or wanted.root not in (None, known.root_model):
        return False
    called = wanted.model or wanted.adapter
    return name == (called or model) or (called is None and bool(backend.pool or wanted.root))


def _matching(name: str, backend: BackendSettings, members: Iterable[Member]) -> Backends:
    """The pools that a backend of the model with this name matches now."""
    wanted = backend.match

    def card_of(member: Member) -> ModelCard | None:
        base = base_card(member.cards)
        if base is None or backend.pool not in (None, member.pool) or wanted.root not in (None, base.root):
            return None
        if not wanted.labels.items() <= member.labels.items():
            return None
        cards = {card.id: card for card in member.cards}
        called = wanted.model or wanted.adapter
        return cards.get(called) if called is not None else cards.get(name, base)

    chosen = ((member, card) for member in members if (card := card_of(member)) is not None)
    return tuple(served_by(chosen, backend.name).values())
