"""Chooses the pool of a request whose model several pools serve."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Mapping

from coordinator.pool.pool import Pool
from coordinator.store import Store
from gateway.replicas.fleet import Fleet
from gateway.replicas.offers import Offer
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from gateway.routing.backends import PoolRoom, choose_option, choose_pool

_CACHE_POLICIES = frozenset({"prefix_kv_aware", "consistent_hash"})
_READY_FOR_S, _MOST_READY = 0.1, 256


class PoolChoice:
    """What one gateway knows of its pools' room."""

    def __init__(self, slots: int, store: Store, fleet: Fleet) -> None:
        """`slots`: the requests that a replica may have at a time; 0: any number."""
        self._store, self._fleet = store, fleet
        self.use(slots)
        self._ready: dict[frozenset[str], tuple[float, frozenset[str]]] = {}
        """Replicas → when this gateway looked which of them are ready, and these."""

    def use(self, slots: int) -> None:
        """So many hold from now on."""
        self._slots = slots or math.inf

    def forget(self) -> None:
        """Replicas have come, gone or changed."""
        self._ready.clear()

    def aim(self, job: Job, tried: Collection[str] = (), asked: Collection[str] = ()) -> bool:
        """Chooses the pool of a request whose model has several, but none of those that were `asked`. A request stays
        in its pool while that has a ready replica that was not `tried`. If no replica that suits the request is ready,
        others will do: how many tokens it has is only estimated. But after a failure of one that suits it, that failure
        tells its client more than a refusal. Returns whether there is a pool to ask."""
        route = job.route
        if route.pinned:
            return False
        now_s = time.monotonic()
        rooms = self._rooms(job, tried, asked, now_s)
        if tried and not asked and (here := rooms.get(route.served.backend)) is not None and here.ready:
            return True
        if route.offer is not None and route.offer.options:
            groups = open_options(job, rooms)
            option = route.option if route.option in groups else _provisional(job, groups)
            rooms = groups.get(option, {})
        chosen = choose_pool(rooms, _conversation(job))
        if chosen is None and not tried and route.is_choosy:
            route.takes_any()
            return self.aim(job)
        if chosen is not None:
            route.aim(next(each for each in route.backends if each.backend == chosen))
        return chosen is not None

    def ways(self, job: Job) -> list[ServedModel]:
        """If the store is to choose among several backends of the request's model: these, each with one pool."""
        route = job.route
        if route.offer is None or len(route.offer.options) < 2 or route.option or route.pinned:
            return []
        groups = open_options(job, self._rooms(job, (), (), time.monotonic()))
        if len(groups) < 2:
            return []
        conversation, backends = _conversation(job), {each.backend: each for each in route.backends}
        return [backends[name] for rooms in groups.values() if (name := choose_pool(rooms, conversation))]

    def _rooms(self, job: Job, tried: Collection[str], asked: Collection[str], now_s: float) -> dict[str, PoolRoom]:
        route = job.route
        able = [each for each in route.backends if each.takes(route.needed_tokens, route.refusing)] or route.backends
        return {
            each.backend: self._room_of(each.fitting(route.needed_tokens, route.refusing), tried, now_s)
            for each in able
            if each.backend not in asked
        }

    def _room_of(self, served: ServedModel, tried: Collection[str], now_s: float) -> PoolRoom:
        pool = self._store.pool(served.pool)
        ready = self._ready_of(served, pool, now_s)
        has_waiting = pool.state is not None and pool.state.has_waiting
        left = len(ready) - len(ready.intersection(tried))
        return PoolRoom(left, len(pool.live) * pool.gateways, has_waiting, self._slots)

    def _ready_of(self, served: ServedModel, pool: Pool, now_s: float) -> frozenset[str]:
        """Its replicas that get requests, as of a moment ago: to look at a thousand takes a millisecond."""
        at_s, ready = self._ready.get(served.names, (0.0, served.names))
        if now_s - at_s > _READY_FOR_S:
            state = pool.state
            ready = frozenset(
                name
                for name in served.names
                if self._fleet.is_ready(name) and not (state is not None and state.has_open_breaker(name))
            )
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            self._ready[served.names] = now_s, ready
        return ready

    def has_ready(self, served: ServedModel, now_s: float) -> bool:
        """Whether one of its replicas gets requests."""
        return bool(self._ready_of(served, self._store.pool(served.pool), now_s))


def aim_at_any(job: Job, asked: Collection[str]) -> bool:
    """No pool has a ready replica as far as this gateway knows. But its heartbeats are up to half a second old, and the
    store may know one. So pools that were not asked are asked, too. Returns whether there is one."""
    route = job.route
    left = () if route.pinned else [each for each in route.backends if each.backend not in asked]
    if left:
        route.aim(left[0])
    return bool(left)


def open_options(job: Job, rooms: Mapping[str, PoolRoom]) -> dict[str, dict[str, PoolRoom]]:
    """The options of the request's model from which to choose, each with the rooms of its pools: the ready ones. Those
    without weight only if no other is ready."""
    route = job.route
    assert route.offer is not None
    groups: dict[str, dict[str, PoolRoom]] = {}
    for each in route.backends:
        if (room := rooms.get(each.backend)) is not None and room.ready:
            groups.setdefault(each.option, {})[each.backend] = room
    weighty = {name: group for name, group in groups.items() if _weight(route.offer, name)}
    return weighty or groups


def _weight(offer: Offer, option: str) -> int:
    return offer.options[option].weight if option in offer.options else 0


def _provisional(job: Job, groups: Collection[str]) -> str:
    """The option of a request for which the store has not chosen."""
    offer = job.route.offer
    assert offer is not None
    weights = {name: _weight(offer, name) for name in groups}
    return choose_option(weights, _conversation(job)) if weights else ""


def _conversation(job: Job) -> bytes:
    """The bytes by which a conversation stays with its pool. Random if its prompt was not read, or if its policy does
    not look at caches."""
    prompt = job.route.prompt
    if prompt is None or not prompt.keys or job.policy not in _CACHE_POLICIES:
        return random.randbytes(8)
    return prompt.first_content
