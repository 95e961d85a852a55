"""Where a request goes: the only thing about a request that changes between its attempts."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gateway.prompt import Prompt
from gateway.replicas.fleet import Fleet
from gateway.replicas.offers import Offer
from gateway.replicas.served import Backends, ServedModel, within
from gateway.settings.model_settings import FallbackSettings


@dataclass(slots=True, eq=False)
class Route:
    """The route of one request. It changes only by its own methods."""

    placed_as: str | None
    """The model that it is placed as: the one that the client named, the only one if it named none, or a fallback."""
    backends: Backends
    """The pools that serve this model."""
    offer: Offer | None
    """What the configuration says of this model; None if nothing."""
    served: ServedModel
    """The backend that it goes to, with only those of its replicas that can take its prompt and answer."""
    fallbacks: tuple[FallbackSettings, ...] = ()
    """The models that may answer in the place of its own, and were not tried."""
    subset: frozenset[str] | None = None
    """The `host:port` of the replicas that it may go to; None if any."""
    option: str = ""
    """The backend of the offer that was chosen for it; "" before."""
    prompt: Prompt | None = None
    """With its chain at the backend that it goes to; without keys if that chain is not known."""
    tokens: list[int] = field(default_factory=list)
    """Estimated prompt tokens up to each prefix key of this chain, shallow to deep."""
    chains: Mapping[str, tuple[Prompt, list[int]]] = field(default_factory=dict)
    """If there are several backends: `prompt` and `tokens` at each."""
    needed_tokens: int = 0
    """The tokens of its prompt, and those that its answer may have."""
    refusing: frozenset[str] = frozenset()
    """Replicas that refused it, because they do not take what it brings."""
    pinned: str = ""
    """The only replica that can serve the request; empty if any can."""
    stays: bool = False
    """Whether only its backend can serve it: the beginning of its answer comes from there."""
    held_since_s: float = 0.0
    """Since when it has waited for a ready replica (monotonic clock); 0 if it had not to."""
    waited_s: float = 0.0
    """How long it has waited for room in pools that could not serve it after all."""
    billed_at_s: float = 0.0
    """The moment of which days, weeks and months it counts to budgets (Unix time); 0 before it was placed."""
    may_pair: bool = True
    """Whether another replica may still compute its prompt: not after that has failed."""
    trace_headers: Mapping[str, str] | None = None
    """What a replica needs for its own spans, in the place of what the client sent; None if that passes."""

    @property
    def counts_as(self) -> str | None:
        """The model that it counts as: of an alias its model, of a fallback the model that answers."""
        return self.offer.model if self.offer is not None else self.placed_as

    @property
    def has_choice(self) -> bool:
        """Whether it can go to several pools, or only to some replicas of its pool."""
        return len(self.backends) > 1 or self.served is not self.backends[0]

    @property
    def is_choosy(self) -> bool:
        """Whether some replicas are left out, because they do not seem to suit it."""
        return any(each.fitting(self.needed_tokens, self.refusing) is not each for each in self.backends)

    def could_serve(self) -> Collection[str]:
        """The replicas of all backends; if it is pinned, the only one."""
        if self.pinned:
            return (self.pinned,)
        if len(self.backends) < 2:
            return self.served.replicas
        return {name for backend in self.backends for name in backend.replicas}

    def backends_of(self, fleet: Fleet) -> Backends:
        """Those that could serve it now."""
        backends = within(fleet.backends(self.placed_as), self.subset)
        return tuple(each for each in backends if each.backend == self.served.backend) if self.stays else backends

    def for_rest(self) -> Route:
        """The route of the rest of its stream. It stays with its backend: others may have other weights. What it waited
        before the stream began does not count."""
        return replace(self, backends=(self.served,), fallbacks=(), stays=True, held_since_s=0.0, waited_s=0.0)

    def was_read(
        self,
        prompt: Prompt,
        tokens: list[int],
        chains: Mapping[str, tuple[Prompt, list[int]]],
        needed_tokens: int,
        refusing: frozenset[str],
    ) -> None:
        """Its prompt is known now. Replicas in `refusing` are known not to take it."""
        self.prompt, self.tokens, self.chains = prompt, tokens, chains
        self.needed_tokens, self.refusing = needed_tokens, refusing
        self.aim(self.served)

    def aim(self, backend: ServedModel) -> None:
        """From now on it goes to this backend. A chain of another backend means nothing there."""
        if self.prompt is not None and self.prompt.keys and backend.backend != self.served.backend:
            self.prompt, self.tokens = self.chains.get(backend.backend) or (self.prompt.without_keys(), [])
        self.served = backend if self.pinned else backend.fitting(self.needed_tokens, self.refusing)
        if not self.may_pair and not self.pinned and self.served.computing.replicas:
            self.served = self.served.computing

    def pin(self, replica: str, backend: ServedModel) -> None:
        """From now on it goes to this replica of this backend, and to no other."""
        self.pinned = replica
        self.aim(backend)

    def renew(self, fleet: Fleet) -> None:
        """Replicas may have come or gone. It stays as it was if nobody serves its model any more, or if one replica is
        to serve it."""
        backends = self.backends_of(fleet)
        if backends and not self.pinned:
            self.backends_changed(backends, fleet)
            self.aim(next((each for each in backends if each.backend == self.served.backend), backends[0]))

    def backends_changed(self, backends: Backends, fleet: Fleet) -> None:
        """Its model has these backends now. It has to be aimed at one of them."""
        self.backends, self.offer = backends, fleet.offers.get(self.placed_as or "")

    def chose(self, option: str) -> None:
        """This backend of its offer was chosen for it."""
        self.option = option

    def next_fallback(self) -> FallbackSettings:
        """The next model that may answer in the place of its own. It is tried now, so it is none of the fallbacks any
        more."""
        told, *others = self.fallbacks
        self.fallbacks = tuple(others)
        return told

    def fall_back(self, model: str, fleet: Fleet) -> None:
        """From now on it is placed as a request for this model, which has backends."""
        self.placed_as, self.option = model, ""
        self.renew(fleet)

    def needs(self, tokens: int) -> None:
        """It has turned out to need at least so many."""
        self.needed_tokens = max(self.needed_tokens, tokens)

    def refused_by(self, replicas: Collection[str]) -> None:
        """These replicas do not take what it brings."""
        self.refusing = self.refusing.union(replicas)

    def takes_any(self) -> None:
        """Any replica will do from now on: no replica that seems to suit it is ready."""
        self.needed_tokens, self.refusing = 0, frozenset()

    def was_held(self, since_s: float) -> None:
        """It waits for a ready replica. If it has waited before, it keeps its place."""
        self.held_since_s = self.held_since_s or since_s

    def noted_wait(self, waited_s: float) -> None:
        """It has waited for room in vain. Elsewhere it keeps its place, and what is left of its time."""
        if waited_s > self.waited_s:
            self.waited_s = waited_s
            self.was_held(time.monotonic() - waited_s)

    def billed(self, at_s: float) -> None:
        """It counts to the budgets of this moment, also if it is placed again."""
        self.billed_at_s = at_s

    def pairs_no_more(self) -> None:
        """The replica that decodes computes its prompt, too, from now on, if there are any that do."""
        if self.served.computing.replicas:
            self.may_pair = False
            self.aim(self.served)

    def traced(self, headers: Mapping[str, str] | None) -> None:
        """Its next attempt has a span of its own. None if nobody traces it."""
        self.trace_headers = headers
