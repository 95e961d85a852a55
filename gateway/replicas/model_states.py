"""Which models have no ready replica, and which several pools serve: for /ready, metrics, the console and the log."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from gateway.replicas.fleet import Fleet

_log = structlog.get_logger("kvgate.models")


class ModelStates(NamedTuple):
    """What operators should know of the models that the targets serve, or have served last."""

    down: tuple[str, ...]
    """Models without a ready replica."""
    in_several_pools: dict[str, tuple[str, ...]]
    """Model → the pools with a ready replica, if there are several."""


def model_states(fleet: Fleet) -> ModelStates:
    """The states of all models now."""
    ready = set(fleet.ready_replicas())
    down, several = [], {}
    for name, backends in sorted(fleet.served.items()):
        pools = sorted({each.pool for each in backends if not ready.isdisjoint(each.replicas)})
        if not pools:
            down.append(name)
        elif len(pools) > 1:
            several[name] = tuple(pools)
    return ModelStates(tuple(down), several)


class ModelLog:
    """Logs each change of these states once."""

    def __init__(self) -> None:
        self._last = ModelStates((), {})

    def note(self, states: ModelStates) -> None:
        """Compare with the states before."""
        last, self._last = self._last, states
        for name in sorted(set(states.down) - set(last.down)):
            _log.error("no replica is ready for a model: its requests fail or wait", model=name)
        for name in sorted(set(last.down) - set(states.down)):
            _log.info("a replica is ready for a model again, or nothing serves it any more", model=name)
        for name, pools in states.in_several_pools.items():
            if last.in_several_pools.get(name) != pools:
                hint = (
                    "its replicas run different models, as in an update of weights: they share its requests, and no KV"
                )
                _log.warning("several pools serve a model", model=name, pools=list(pools), hint=hint)
        for name in last.in_several_pools.keys() - states.in_several_pools.keys():
            _log.info("one pool serves a model again", model=name)
