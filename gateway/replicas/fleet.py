"""The replicas that a gateway knows, and the models that they serve.

A `Member` is one replica. A `ServedModel` is one model name in one pool, with the replicas that serve it there. A name
may have several of them, its *backends*: replicas of another `root` are in another pool. The `Fleet` holds all of both.
The health checks (`health_checks`) keep them up to date.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from coordinator.engine.facts import EngineFacts, ModelCard, base_card, max_tokens_of
from coordinator.registry import ASLEEP, ReplicaRecord
from coordinator.store import Store
from coordinator.subset import Subset
from gateway.replicas.identity import Identity
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.upstream import Upstream

_PROBLEMS = {
    "hung": "it has work, and shows no progress",
    "draining": "it is drained: it gets no new requests until `kvgate undrain`, or until it restarts",
    ASLEEP: "it sleeps or is paused: it gets requests again when it is awake (POST /wake_up or /resume)",
    "dead": "it answers this gateway, but not the gateway that checks the pool's replicas",
}
_REFUSES_FOR_S = 60.0
_READS_EVERY_S = 1.0
_LIVES = re.compile(r"life-(\d{1,15})")


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


@dataclass(frozen=True)  # without slots: cached_property keeps its value in __dict__
class ServedModel:
    """A model name that clients use, in one pool: its replicas there, and what enters the root of its prompts."""

    pool: str
    root_model: str
    adapter: str | None
    replicas: dict[str, str]
    """Replica → URL, from this gateway's settings or discovery. URLs never come from the store, so whoever can write
    there cannot send prompts elsewhere."""
    unshared: dict[str, str] = field(default_factory=dict)
    """Replicas whose id belongs to another engine in the registry (see `identity`) → their incarnation here."""
    max_tokens: dict[str, int] = field(default_factory=dict)
    """Replica → the most tokens of a prompt and its answer (its `max_model_len`); not there if it does not tell."""
    name: str = ""
    """The name by which its replicas know it; "" if that is the name that the request uses."""

    @cached_property
    def shared(self) -> Subset:
        """The replicas among which the store may choose."""
        return Subset.of(name for name in self.replicas if name not in self.unshared)

    @cached_property
    def backend(self) -> str:
        """Names it among the backends of its name: those of different pools or adapters share no prefix key."""
        return self.pool if self.adapter is None else f"{self.pool} {self.adapter}"

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


Backends = tuple[ServedModel, ...]
"""The pools that serve one model name, each with its replicas; most names have one."""


class Fleet:
    """The replicas that this gateway knows."""

    def __init__(self, replicas: Sequence[ReplicaSettings], store: Store, upstream: Upstream) -> None:
        self.members: dict[str, Member] = {}
        """By id. Targets get requests from this gateway; the others only get health checks."""
        self.changed = asyncio.Event()
        """Set when the targets have changed, so that the health checks run at once."""
        self.id_conflicts: dict[str, str] = {}
        """Replica → what is wrong, if its id belongs to another engine in the registry; else empty."""
        self.known: dict[str, ServedModel] = {}
        """Models that requests may name although no replica serves them: see known_models.py."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when replicas have come, gone or changed their models."""
        self._targets: dict[str, None] = {}
        """The ids of the replicas that get requests, in order."""
        self._store = store
        self._upstream = upstream
        self._media_refused: dict[str, float] = {}
        """Replica that refused media which another one took → until when it is not asked again."""
        self._served: dict[str, Backends] | None = None
        """None until it is asked for again: many replicas change at once when a gateway starts."""
        self.set_targets(replicas)

    def set_targets(self, replicas: Sequence[ReplicaSettings]) -> None:
        """From now on these replicas get requests, and no others. Running requests finish where they are. Removed
        replicas keep their health checks, because other gateways may still send them requests."""
        for replica in replicas:
            member = self.members.get(replica.id)
            if member is None or (member.url, member.dp_rank) != (replica.url, replica.dp_rank) or not member.cards:
                self.members[replica.id] = Member(replica.id, replica.url, replica.dp_rank)
            elif replica.id not in self._targets:
                self.recheck(replica.id)  # it may have restarted while nobody checked it
            self.members[replica.id].labels = replica.labels
        self._targets = dict.fromkeys(replica.id for replica in replicas)
        self._upstream.keep_only(replica.url for replica in replicas)
        self.update_served()
        self.changed.set()

    @property
    def targets(self) -> list[Member]:
        """The replicas that get requests from this gateway."""
        return [self.members[name] for name in self._targets]

    def is_target(self, replica: str) -> bool:
        """Whether the replica gets requests from this gateway."""
        return replica in self._targets

    def is_ours(self, member: Member) -> bool:
        """Whether this member is a target at its present address. No other address gets the replicas' API key."""
        return self.is_target(member.id) and self.members.get(member.id) is member

    def describe(self) -> dict[str, str]:
        """Replica → "alive", or what is wrong with it."""
        return {member.id: "alive" if member.alive else member.problem for member in self.members.values()}

    def backends(self, model: str | None) -> Backends:
        """The backends of the model that a client's request names, or of the only base model if it names none. Empty if
        the model is not known. A known model that nobody serves now has one backend, without replicas."""
        if model is None:
            return self.only_base_model()
        found = self.served.get(model)
        if found is not None:
            return found
        known = self.known.get(model)
        return (known,) if known is not None else ()

    @property
    def served(self) -> dict[str, Backends]:
        """The models that requests can name."""
        if self._served is None:
            self._served = served_by(self.targets)
        return self._served

    def pools(self) -> dict[str, ServedModel]:
        """Pool → a model that is served there."""
        return {backend.pool: backend for backends in self.served.values() for backend in backends}

    def only_base_model(self) -> Backends:
        """The base model for requests that name none; empty unless there is exactly one. Several pools are one model if
        all of them serve one name."""
        bases = [backends for backends in self.served.values() if all(each.adapter is None for each in backends)]
        pools = {each.pool for backends in bases for each in backends}
        return next((each for each in bases if len({backend.pool for backend in each}) == len(pools)), ())

    def block_tokens(self, replica: str) -> int:
        """Tokens in one block of the replica's cache; vLLM's default if the replica does not tell."""
        member = self.members.get(replica)
        return (member.facts.block_size if member is not None else 0) or 16

    def is_ready(self, replica: str) -> bool:
        """Whether it is ready according to the pool's worker or, without a store, to this gateway."""
        member = self.members.get(replica)
        return member is not None and self._state(member) == "ready"

    def is_draining(self, replica: str) -> bool:
        """Whether it is drained: it gets no new requests."""
        member = self.members.get(replica)
        return member is not None and self._state(member) == "draining"

    def is_asleep(self, replica: str) -> bool:
        """Whether its engine was put to sleep, or is paused."""
        member = self.members.get(replica)
        return member is not None and self._state(member) == ASLEEP

    def is_exact(self, replica: str) -> bool:
        """Whether an agent reports what the replica holds, according to the last heartbeat."""
        member = self.members.get(replica)
        if member is None or not member.pool or member.identity.is_taken or not self._store.is_connected(member.pool):
            return False
        fleet = self._store.pool(member.pool).state
        return fleet is not None and fleet.is_exact(replica)

    def ready_replicas(self) -> list[str]:
        return [name for name in self._targets if self.is_ready(name)]

    def model_cards(self) -> list[dict[str, Any]]:
        """The model cards of all ready replicas and of known models, each id once: that of the replica that takes the
        longest prompts. In the engines' order, because clients take the first model of the list: base models by their
        primary names first, adapters last."""
        union: dict[str, dict[str, Any]] = {}
        for name in sorted(self.ready_replicas()):
            for card in self.members[name].cards:
                if card.id not in union or card.max_tokens > max_tokens_of(union[card.id]):
                    union[card.id] = card.document
        for name, known in sorted(self.known.items()):
            if name not in union:
                parent = known.root_model if known.adapter is not None else None
                union[name] = {"id": name, "object": "model", "root": known.root_model, "parent": parent}
        return sorted(union.values(), key=lambda card: card.get("parent") is not None)

    def problems(self) -> dict[str, str]:
        """Replica that is not ready → why."""
        unready = [self.members[name] for name in sorted(self._targets) if not self.is_ready(name)]
        return {each.id: each.problem or _PROBLEMS.get(self._state(each), "not registered yet") for each in unready}

    def taken_ids(self) -> dict[str, str]:
        """Target whose id belongs to another engine in the registry → what is wrong, and what to do."""
        return {name: problem for name in sorted(self._targets) if (problem := self.id_conflicts.get(name))}

    def _state(self, member: Member) -> str:
        if member.identity.is_taken:  # the record describes another engine
            return "dead" if not member.alive else ASLEEP if member.is_asleep else "ready"
        record = self._store.pool(member.pool).records.get(member.id) if member.pool else None
        return record.state if record is not None else ""

    def recheck(self, replica: str) -> None:
        """A request to this replica broke: the next round checks whether it has restarted."""
        member = self.members.get(replica)
        if member is not None:
            member.failures = max(member.failures, 1)

    def note_media_refusal(self, replicas: Iterable[str]) -> None:
        """These replicas refused media that another one took. One that has taken media before had another reason: an
        image that could not be fetched then."""
        until_s = time.monotonic() + _REFUSES_FOR_S
        self._media_refused |= {name: until_s for name in replicas if not self.takes_media(name)}

    def asks_usage(self, replica: str) -> bool | None:
        """Whether to ask this replica for the usage of a stream whose client says nothing of it. None for the first
        such stream: it is sent as it is, and shows whether the replica tells its usage by itself. Until that stream has
        ended, others are asked. Call `learn_usage` at its end."""
        member = self.members.get(replica)
        if member is None:
            return True
        if member.forces_usage is None:
            member.forces_usage = False
            return None
        return not member.forces_usage

    def learn_usage(self, replica: str, forces_usage: bool | None) -> None:
        """The first stream of a replica has ended. None: it has shown nothing, and the next one may."""
        if (member := self.members.get(replica)) is not None:
            member.forces_usage = forces_usage

    def takes_media(self, replica: str) -> bool:
        """Whether it has taken media since it started."""
        member = self.members.get(replica)
        return member is not None and member.takes_media

    def refusing_media(self) -> frozenset[str]:
        """The replicas that take no media, as far as their refusals tell. After a while they are asked again."""
        if self._media_refused:
            now_s = time.monotonic()
            self._media_refused = {name: until_s for name, until_s in self._media_refused.items() if until_s > now_s}
        return frozenset(self._media_refused)

    def read_again(self, replica: str) -> None:
        """It may serve other models now than this gateway knows: they are read again, at once if its last check is not
        new."""
        member = self.members.get(replica)
        if member is not None and not member.reads_again:
            member.reads_again = True
            if time.monotonic() - member.checked_s > _READS_EVERY_S:
                self.changed.set()

    def update_served(self) -> None:
        """Update the served models after a change of the targets, their model cards or their identity."""
        self._served = None
        self.on_change()


def served_by(members: Iterable[Member]) -> dict[str, Backends]:
    """Model name → its backends, each with those of these replicas that serve it."""
    names: dict[str, dict[str, ServedModel]] = {}
    for member in sorted(members, key=lambda each: each.id):
        base = base_card(member.cards)
        for card in member.cards:
            assert base is not None
            adapter = card.id if card.parent is not None else None
            model = ServedModel(member.pool, base.root, adapter, {}, name=card.id)
            served = names.setdefault(card.id, {}).setdefault(model.backend, model)
            served.replicas[member.id] = member.url
            if card.max_tokens or base.max_tokens:
                served.max_tokens[member.id] = card.max_tokens or base.max_tokens
            if member.identity.is_taken:
                served.unshared[member.id] = member.facts.started
    return {name: tuple(backends.values()) for name, backends in names.items()}
