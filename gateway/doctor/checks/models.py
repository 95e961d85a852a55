"""Whether every model can be served, by whom, and in which shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from coordinator.finding import FindingKind, Result
from gateway.doctor.evidence import Evidence, Unknown, grouped

NAME_TWICE = FindingKind(
    "name-in-several-pools",
    "warning",
    "its requests are shared between pools, by their ready replicas: clients get answers of either model, and no KV is "
    "shared between them",
    "finish the update of weights; or make each pool a backend with a weight (`models`), start all with exactly the "
    "same model path, or give each model its own --served-model-name",
)
MODEL_DOWN = FindingKind(
    "model-down",
    "error",
    "its requests fail, or wait for a replica, though gateways serve other models",
    "start a replica of it; if nobody is to serve it any more, remove it from the gateways' `models` and its replicas "
    "from `replicas`",
)
ON_FALLBACK = FindingKind(
    "model-on-fallback",
    "warning",
    "another model answers what its `fallback` allows; its other requests fail, or wait for a replica",
    "start a replica of it",
)
UNKNOWN_FALLBACK = FindingKind(
    "fallback-unknown",
    "warning",
    "nobody answers in the model's place when it has no ready replica",
    "correct its `fallback` in the gateways' `models` (GET /v1/models lists the names that are served), or start a "
    "replica that serves the fallback",
)
WITHOUT_REPLICAS = FindingKind(
    "backend-without-replicas",
    "warning",
    "the other backends of the model get its share of the requests",
    "start a replica that it matches; /ready (labels, not_ready) shows why none does; or give it the weight 0",
)
APPROXIMATE = FindingKind(
    "weights-approximate",
    "warning",
    "no script can count over several slots, so gateways share a model's requests by hashing conversations: 1 in 100 "
    "may be 2 or none",
    "use one Redis, with replicas of it or Sentinel, if weights must hold exactly",
)


def names(evidence: Evidence) -> Iterator[Result]:
    """Whether all replicas that serve a name run the same model: as they say themselves, or as gateways say. Those of a
    model with configured backends may run several."""
    pools: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for replica in evidence.replicas():
        for card in () if isinstance(replica.cards, Unknown) else replica.cards:
            if card.parent is None:
                pools[card.id][replica.id] = card.root
    said = {
        name: f"pools {', '.join(pools)}" for each in evidence.gateways for name, pools in each.several_pools.items()
    }
    meant = {name for gateway in evidence.gateways for name in gateway.models}
    for name, roots in pools.items():
        if name not in meant and (differing := grouped(roots)):
            said[name] = differing
    for name, differing in sorted(said.items()):
        yield NAME_TWICE.seen(f"model {name}", f"its replicas run different models: {differing}")


def down(evidence: Evidence) -> Iterator[Result]:
    """Whether every model has a ready replica, as gateways say."""
    said = {name: gateway for gateway in evidence.gateways for name in gateway.models_down}
    for name in sorted(said):
        what, answering = f"{said[name].name} says that no replica is ready for it", said[name].answered_by.get(name)
        if answering:
            yield ON_FALLBACK.seen(f"model {name}", f"{what}; {', '.join(answering)} may answer")
        else:
            yield MODEL_DOWN.seen(f"model {name}", what)


def fallbacks(evidence: Evidence) -> Iterator[Result]:
    """Whether every fallback is the name of a model, as gateways say."""
    said = {model: found for gateway in evidence.gateways for model, found in gateway.unknown_fallbacks.items()}
    for model, found in sorted(said.items()):
        yield UNKNOWN_FALLBACK.seen(f"model {model}", f"no replica serves its fallback {', '.join(found)}")


def backends(evidence: Evidence) -> Iterator[Result]:
    """Whether every backend that has weight has a ready replica, as gateways say, unless its model has none at all."""
    for gateway in evidence.gateways:
        for model, found in gateway.without_replicas.items():
            if model not in gateway.models_down:
                what = f"no replica is ready for {', '.join(found)}"
                yield WITHOUT_REPLICAS.seen(f"model {model}", what)


def weights(evidence: Evidence) -> Iterator[Result]:
    """Whether weights hold exactly. While a gateway is without Redis, another finding says that."""
    if any(each.are_weights_approximate and not each.store_problem for each in evidence.gateways):
        yield APPROXIMATE.seen("models", "redis.url is a Redis Cluster, and models have several backends")


CHECKS = (names, down, fallbacks, backends, weights)
