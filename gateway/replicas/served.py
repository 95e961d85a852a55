"""Model names, and the replicas that serve them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Final
from urllib.parse import urlsplit

from coordinator.engine.facts import ModelCard, base_card
from coordinator.subset import Subset
from gateway.replicas.member import Member

NONE_DECODES: Final = (
    "no replica that is ready decodes this model, and prefill replicas answer no request by themselves. Start one with "
    "the role decode or both, or give one this role"
)


@dataclass(frozen=True)  # without slots: cached_property keeps its value in __dict__
class ServedModel:
    """A model name that clients use, in one pool: its replicas there, and what enters the root of its prompts."""

    pool: str
    root_model: str
    adapter: str | None
    replicas: dict[str, str]
    """Replica → URL, from this gateway's settings, from discovery or from signed records. Of the store, no other URL is
    used, so whoever can write there cannot send prompts elsewhere."""
    unshared: dict[str, str] = field(default_factory=dict)
    """Replicas whose id belongs to another engine in the registry (see `identity`) → their incarnation here."""
    prefills: dict[str, str] = field(default_factory=dict)
    """Replica → URL of those that may compute prompts for the others; empty if all compute their own."""
    prefill_themselves: set[str] = field(default_factory=set)
    """The replicas that compute all their prompts themselves."""
    decode_only: set[str] = field(default_factory=set)
    """The replicas that take no request whose prompt they would have to compute."""
    max_tokens: dict[str, int] = field(default_factory=dict)
    """Replica → the most tokens of a prompt and its answer (its `max_model_len`); not there if it does not tell."""
    name: str = ""
    """The name by which its replicas know it; "" if that is the name that the request uses."""
    option: str = ""
    """The backend of the configured model that it is, or is a part of; "" if the configuration names none."""

    @cached_property
    def shared(self) -> Subset:
        """The replicas among which the store may choose."""
        return Subset.of(name for name in self.replicas if name not in self.unshared)

    @cached_property
    def prefilling(self) -> Subset:
        """The replicas among which the store may choose one that computes a prompt for another one."""
        return Subset.of(self.prefills)

    @cached_property
    def computing(self) -> ServedModel:
        """This model with only those of its replicas that compute prompts."""
        return self._only(self.names - self.decode_only) if self.decode_only else self

    @cached_property
    def backend(self) -> str:
        """Names it among the backends of its name: those of different pools or adapters share no prefix key."""
        backend = self.pool if self.adapter is None else f"{self.pool} {self.adapter}"
        return f"{backend} {self.option} {self.name}" if self.option else backend

    @cached_property
    def names(self) -> frozenset[str]:
        """Its replicas."""
        return frozenset(self.replicas)

    @cached_property
    def longest_tokens(self) -> int:
        """The most tokens that any of its replicas takes; 0 if one has no known limit."""
        lengths = [self.max_tokens.get(name, 0) for name in self.replicas]
        return 0 if 0 in lengths else max(lengths, default=0)

    @cached_property
    def _shortest_tokens(self) -> float:
        return min(self.max_tokens.values(), default=inf)

    @cached_property
    def _fitting(self) -> dict[frozenset[str], ServedModel]:
        return {}

    def fitting(self, tokens: int, refusing: Collection[str] = ()) -> ServedModel:
        """This model with only those of its replicas that take a prompt and answer of so many tokens, and are not in
        `refusing`. If none is left, those that take the most tokens: then the engine says what is wrong."""
        if tokens <= self._shortest_tokens and not refusing:
            return self
        least = min(tokens, self.longest_tokens) if self.longest_tokens else tokens
        fit = [name for name in self.replicas if self.max_tokens.get(name, least) >= least]
        names = frozenset(name for name in fit if name not in refusing) or frozenset(fit)
        if len(names) == len(self.replicas):
            return self
        if names not in self._fitting:
            self._fitting[names] = self._only(names)
        return self._fitting[names]

    def within(self, endpoints: frozenset[str]) -> ServedModel | None:
        """This model with only those of its replicas that are at one of these `host:port`; None if none is."""
        names = frozenset(name for name, url in self.replicas.items() if endpoint_in(url) in endpoints)
        if len(names) == len(self.replicas):
            return self
        if names and names not in self._fitting:
            self._fitting[names] = self._only(names)
        return self._fitting[names] if names else None

    def takes(self, tokens: int, refusing: Collection[str]) -> bool:
        """Whether a replica that is not in `refusing` takes a prompt and answer of so many tokens."""
        if tokens <= self._shortest_tokens and not refusing:
            return True
        return any(self.max_tokens.get(name, tokens) >= tokens for name in self.replicas if name not in refusing)

    def _only(self, names: frozenset[str]) -> ServedModel:
        replicas = {name: url for name, url in self.replicas.items() if name in names}
        unshared = {name: life for name, life in self.unshared.items() if name in names}
        lengths = {name: tokens for name, tokens in self.max_tokens.items() if name in names}
        return replace(self, replicas=replicas, unshared=unshared, max_tokens=lengths)


def endpoint_in(url: str) -> str:
    """The `host:port` of a URL, with its port also if that is the usual one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


Backends = tuple[ServedModel, ...]
"""The pools that serve one model name, each with its replicas; most names have one."""


def within(backends: Backends, endpoints: frozenset[str] | None) -> Backends:
    """The backends with only those of their replicas that are at one of these `host:port`. None: all."""
    if endpoints is None:
        return backends
    return tuple(found for each in backends if (found := each.within(endpoints)) is not None)


def served_names(members: Iterable[Member]) -> dict[str, Backends]:
    """Model name → its backends, each with those of these replicas that serve it."""
    names: dict[str, list[tuple[Member, ModelCard]]] = {}
    for member in members:
        for card in member.cards:
            names.setdefault(card.id, []).append((member, card))
    return {name: tuple(served_by(offered).values()) for name, offered in names.items()}


def served_by(offered: Iterable[tuple[Member, ModelCard]], option: str = "") -> dict[str, ServedModel]:
    """The backends that these replicas are, each with the card of the model that it is to serve. A backend without a
    replica that answers requests is none of them, unless all are."""
    backends: dict[str, ServedModel] = {}
    roles: dict[str, dict[str, Member]] = {}
    for member, card in sorted(offered, key=lambda each: each[0].id):
        base = base_card(member.cards)
        assert base is not None
        adapter = card.id if card.parent is not None else None
        model = ServedModel(member.pool, base.root, adapter, {}, name=card.id, option=option)
        served = backends.setdefault(f"{model.backend} {card.id}", model)
        roles.setdefault(f"{model.backend} {card.id}", {})[member.id] = member
        if member.role not in ("decode", "both"):
            continue
        served.replicas[member.id] = member.url
        if member.role == "both":
            served.prefill_themselves.add(member.id)
        if member.is_decode_only:
            served.decode_only.add(member.id)
        if card.max_tokens or base.max_tokens:
            served.max_tokens[member.id] = card.max_tokens or base.max_tokens
        if member.identity.is_taken:
            served.unshared[member.id] = member.facts.started
    for name, members_of in roles.items():
        served = backends[name]
        served.prefills.update(_prefills(members_of.values()))
        if not served.prefills:
            backends[name] = served.computing
    return {name: each for name, each in backends.items() if each.replicas} or backends


def _prefills(members: Collection[Member]) -> dict[str, str]:
    """Those that compute prompts for others, unless no other one wants this."""
    if any(each.role == "both" for each in members) and not any(each.role == "decode" for each in members):
        return {}
    return {each.id: each.url for each in members if each.role == "prefill" and not each.identity.is_taken}
