"""The replicas that a gateway knows, and the models that they serve.

A `Member` is one replica. A `ServedModel` is one model name in one pool, with the replicas that serve it there. A name
may have several of them, its *backends*: replicas of another `root` are in another pool. An `Offer` is what the
configuration says of a name. The `Fleet` holds all of these.
The health checks (`health_checks`) keep them up to date.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import structlog

from coordinator.engine.facts import ModelCard, max_tokens_of
from coordinator.registry import ASLEEP
from coordinator.store import Store
from gateway.replicas.member import CHANGING, Member
from gateway.replicas.offers import Offer, offers_of, with_models
from gateway.replicas.served import Backends, ServedModel, served_names
from gateway.replicas.told_role import ToldRole
from gateway.settings.base import ROLE_LABEL
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.settings.model_settings import ModelSettings
from gateway.upstream import Upstream

_log = structlog.get_logger("kvgate.replicas")

_PROBLEMS = {
    "hung": "it has work, and shows no progress",
    "draining": "it is drained: it gets no new requests until `kvgate undrain`, or until it restarts",
    ASLEEP: "it sleeps or is paused: it gets requests again when it is awake (POST /wake_up or /resume)",
    "dead": "it answers this gateway, but not the gateway that checks the pool's replicas",
}
_REFUSES_FOR_S = 60.0
_READS_EVERY_S = 1.0


class Fleet:
    """The replicas that this gateway knows."""

    def __init__(
        self,
        replicas: Sequence[ReplicaSettings],
        store: Store,
        upstream: Upstream,
        models: Sequence[ModelSettings] = (),
    ) -> None:
        self.members: dict[str, Member] = {}
        """By id. Targets get requests from this gateway; the others only get health checks."""
        self.changed = asyncio.Event()
        """Set when the targets have changed, so that the health checks run at once."""
        self.id_conflicts: dict[str, str] = {}
        """Replica → what is wrong, if its id belongs to another engine in the registry; else empty."""
        self.known: dict[str, ServedModel] = {}
        """Models that requests may name although no replica serves them: see known_models.py."""
        self.has_roles = False
        """Whether a label, or a server, has told of a role. Only then servers are asked for theirs."""
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
        self._named: dict[str, Backends] = {}
        """The names that the replicas themselves serve; of the same moment."""
        self._models = models
        self.offers: dict[str, Offer] = offers_of(models)
        """By names and aliases: the models of the configuration."""
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
        self.has_roles = self.has_roles or any(ROLE_LABEL in replica.labels for replica in replicas)
        self._targets = dict.fromkeys(replica.id for replica in replicas)
        self._upstream.keep_only(replica.url for replica in replicas)
        self.update_served()
        self.changed.set()

    def use_models(self, models: Sequence[ModelSettings]) -> None:
        """These are the models of the configuration from now on."""
        self._models, self.offers = models, offers_of(models)
        self.update_served()

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
        name = model if model is not None else self.only_base_model()
        if name is None:
            return ()
        found = self.served.get(name)
        if found is not None:
            return found
        known = self._known(name)
        return (known,) if known is not None else ()

    def _known(self, name: str) -> ServedModel | None:
        """The known model of this name; of a configured one that nobody has served under this name, one of those that
        its backends match."""
        known, offer = self.known.get(name), self.offers.get(name)
        if known is None and offer is not None:
            return next((each for name, each in self.known.items() if offer.may_be(name, each)), None)
        return known

    @property
    def served(self) -> dict[str, Backends]:
        """The models that requests can name."""
        if self._served is None:
            self._named = served_names(self.targets)
            self._served = with_models(self._named, self._models, self.targets)
        return self._served

    @property
    def named(self) -> dict[str, Backends]:
        """The models as the replicas name them."""
        return self._named if self.served else {}

    def pools(self) -> dict[str, ServedModel]:
        """Pool → a model that is served there."""
        return {backend.pool: backend for backends in self.named.values() for backend in backends}

    def only_base_model(self) -> str | None:
        """The base model of requests that name none; None unless there is exactly one. Several pools are one model if
        all of them serve one name."""
        bases = {
            name: {each.pool for each in backends}
            for name, backends in self.named.items()
            if all(each.adapter is None for each in backends)
        }
        every = set[str]().union(*bases.values())
        return next((name for name, pools in bases.items() if len(pools) == len(every)), None)

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

    def has_only_prefills(self, backends: Backends) -> bool:
        """Whether replicas are ready there that compute prompts for others, and none that decodes."""
        if any(self.is_ready(replica) for backend in backends for replica in backend.replicas):
            return False
        return any(self.is_ready(replica) for backend in backends for replica in backend.prefills)

    def ready_replicas(self) -> list[str]:
        return [name for name in self._targets if self.is_ready(name)]

    def model_cards(self) -> list[dict[str, Any]]:
        """The model cards of configured names, of all ready replicas, and of known models, each id once: that of the
        replica that takes the longest prompts. In the order of the configuration and then of the engines, because
        clients take the first model of the list: base models by their primary names first, adapters last."""
        ready = sorted(self.ready_replicas())
        union: dict[str, dict[str, Any]] = {}
        for name in self.offers:
            for card in self._cards_of(name, ready):
                _keep_longest(union, name, card)
        for card in (card for name in ready for card in self.members[name].cards if card.id not in self.offers):
            _keep_longest(union, card.id, card)
        for name, known in sorted(self.known.items()):
            if name not in union:
                parent = known.root_model if known.adapter is not None else None
                union[name] = {"id": name, "object": "model", "root": known.root_model, "parent": parent}
        return sorted(union.values(), key=lambda card: card.get("parent") is not None)

    def ready_fallbacks(self, name: str) -> tuple[str, ...]:
        """The fallbacks of a configured model that have a ready replica."""
        listed = self.offers[name].fallback if name in self.offers else ()
        return tuple(each.model for each in listed if self._has_ready(each.model))

    def _has_ready(self, name: str) -> bool:
        return any(self.is_ready(replica) for backend in self.served.get(name, ()) for replica in backend.replicas)

    def _cards_of(self, name: str, ready: Iterable[str]) -> Iterator[ModelCard]:
        """What ready replicas say of the model that they serve under this configured name. If there is none, what those
        of its fallback say."""
        answering = name if self._has_ready(name) else next(iter(self.ready_fallbacks(name)), name)
        for backend in self.served.get(answering, ()):
            for replica in (each for each in ready if each in backend.replicas):
                yield from (card for card in self.members[replica].cards if card.id == backend.name)

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

    def learn_role(self, member: Member, told: ToldRole | None) -> None:
        """Its server tells this role, or none."""
        self.has_roles = self.has_roles or told is not None
        before, member.told_role = (member.role, member.is_decode_only), told
        if (member.role, member.is_decode_only) != before:
            _log.info("role", replica=member.id, role=member.role or CHANGING, before=before[0] or CHANGING)
            self.update_served()

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

    def tells_ids(self, replica: str) -> bool:
        """Whether its engine tells token ids if it is asked: other engines than vLLM may refuse the question."""
        member = self.members.get(replica)
        return member is not None and any(card.document.get("owned_by") == "vllm" for card in member.cards)

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


def _keep_longest(union: dict[str, dict[str, Any]], name: str, card: ModelCard) -> None:
    if name not in union or card.max_tokens > max_tokens_of(union[name]):
        union[name] = card.document if card.id == name else card.document | {"id": name}
