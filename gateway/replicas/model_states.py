"""Which models and backends have no ready replica, and which models several pools serve: for /ready, metrics, the
console and the log."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import structlog

from gateway.replicas.fleet import Fleet
from gateway.replicas.offers import Offer
from gateway.replicas.served import Backends

_log = structlog.get_logger("kvgate.models")


class BackendState(NamedTuple):
    """A backend of a configured model."""

    weight: int
    ready_replicas: int


class ModelStates(NamedTuple):
    """What operators should know of the configured models, and of those that the targets serve or have served last."""

    down: dict[str, tuple[str, ...]]
    """Model without a ready replica → its fallbacks that have one."""
    in_several_pools: dict[str, tuple[str, ...]]
    """Model → the pools with a ready replica, if there are several. Not if its backends are configured: then these may
    be in any pools."""
    backends: dict[str, dict[str, BackendState]]
    """Configured model → its backends, by name; without models whose backends are not configured."""
    unknown_fallbacks: dict[str, tuple[str, ...]]
    """Configured model → its fallbacks that nobody configures and that no replica serves or has served, if there are
    any."""

    @property
    def answered_by_fallback(self) -> dict[str, tuple[str, ...]]:
        """Model without a ready replica → its fallbacks that have one, if there are any."""
        return {model: fallbacks for model, fallbacks in self.down.items() if fallbacks}

    @property
    def without_replicas(self) -> dict[str, list[str]]:
        """Model → its backends that have weight and no ready replica, if there are any."""
        found = {
            model: [name for name, (weight, ready) in backends.items() if weight and not ready]
            for model, backends in self.backends.items()
        }
        return {model: names for model, names in found.items() if names}


def model_states(fleet: Fleet) -> ModelStates:
    """The states of all models now. An alias is none of its own."""
    ready = set(fleet.ready_replicas())
    down, several, states, unknown = {}, {}, {}, {}
    served, offers = fleet.served, fleet.offers
    names = {*served, *offers, *fleet.known}
    own = {name for name in served if name not in offers}
    for name in sorted(own.union(offer.model for offer in offers.values())):
        backends, offer = served.get(name, ()), offers.get(name)
        if offer is not None and offer.options:
            states[name] = _states(offer, backends, ready)
        if offer is not None and (missing := tuple(each.model for each in offer.fallback if each.model not in names)):
            unknown[name] = missing
        pools = sorted({each.pool for each in backends if not ready.isdisjoint(each.replicas)})
        if not pools:
            if backends or name not in fleet.known:  # else its requests are held: it may have been scaled to zero
                down[name] = fleet.ready_fallbacks(name)
        elif len(pools) > 1 and name not in states:
            several[name] = tuple(pools)
    return ModelStates(down, several, states, unknown)


def _states(offer: Offer, backends: Backends, ready: Collection[str]) -> dict[str, BackendState]:
    replicas: dict[str, set[str]] = {name: set() for name in offer.options}
    for each in backends:
        replicas[each.option].update(each.replicas)
    return {
        name: BackendState(option.weight, len(replicas[name].intersection(ready)))
        for name, option in offer.options.items()
    }


class ModelLog:
    """Logs each change of these states once."""

    def __init__(self) -> None:
        self._last = ModelStates({}, {}, {}, {})

    def note(self, states: ModelStates) -> None:
        """Compare with the states before."""
        last, self._last = self._last, states
        self._note_down(last.down, states.down)
        self._note_backends(_pairs(last), _pairs(states))
        for name, fallbacks in states.unknown_fallbacks.items():
            if last.unknown_fallbacks.get(name) != fallbacks:
                _log.warning("no replica serves a fallback: is it misspelt?", model=name, fallbacks=list(fallbacks))
        for name, pools in states.in_several_pools.items():
            if last.in_several_pools.get(name) != pools:
                hint = (
                    "its replicas run different models, as in an update of weights: they share its requests, and no KV"
                )
                _log.warning("several pools serve a model", model=name, pools=list(pools), hint=hint)
        for name in last.in_several_pools.keys() - states.in_several_pools.keys():
            _log.info("one pool serves a model again", model=name)

    def _note_down(self, last: dict[str, tuple[str, ...]], down: dict[str, tuple[str, ...]]) -> None:
        for name, fallbacks in down.items():
            if last.get(name) == fallbacks:
                continue
            if fallbacks:
                _log.warning(
                    "no replica is ready for a model: its fallbacks answer", model=name, fallbacks=list(fallbacks)
                )
            else:
                _log.error("no replica is ready for a model: its requests fail or wait", model=name)
        for name in sorted(last.keys() - down.keys()):
            _log.info("a replica is ready for a model again, or nothing serves it any more", model=name)

    def _note_backends(self, last: set[tuple[str, str]], without_replicas: set[tuple[str, str]]) -> None:
        for model, backend in sorted(without_replicas - last):
            hint = "the other backends of the model get its requests"
            _log.warning("no replica is ready for a backend", model=model, backend=backend, hint=hint)
        for model, backend in sorted(last - without_replicas):
            _log.info("a replica is ready for a backend again, or it has no weight", model=model, backend=backend)


def _pairs(states: ModelStates) -> set[tuple[str, str]]:
    """The backends without replicas of models that others serve."""
    found = {model: backends for model, backends in states.without_replicas.items() if model not in states.down}
    return {(model, backend) for model, backends in found.items() for backend in backends}
