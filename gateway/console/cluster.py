"""The whole cluster at one moment, as the console draws it. All pages of a gateway share two looks a second at most."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from coordinator.errors import StoreError
from coordinator.pool.lost_gateways import read_lost
from coordinator.pool.pool import Pool
from coordinator.redis.time_limit import answered
from coordinator.registry import PARTIAL, TOLD, UNCONFIRMED, PoolState, is_number, readable
from coordinator.store import Store
from coordinator.watch.store_report import read_report
from gateway.console.history import EVERY_S, POINT, Point, read_history
from gateway.console.shared_look import SharedLook
from gateway.control.operations import Operations
from gateway.control.status import Status
from gateway.errors import ApiError

_EVERY_S, _EVERY_S_A_REPLICA = 0.5, 0.002
"""How often it looks at least; less often in a fleet of more than 250, because a look reads each replica's records."""
_MOST_GATEWAYS = 64
_WITHIN_S = 1.0
"""How long it waits for the store: while that is slow, pages are told so, and what was seen last."""


class ClusterView:
    """Looks at the cluster for the pages of one gateway."""

    def __init__(self, status: Status, operations: Operations, store: Store) -> None:
        self._status, self._operations, self._store = status, operations, store
        self._seen: dict[str, Any] = {
            "seen_ms": 0,  # when the store answered last
            "store_ms": 0,  # the same in Redis time
            "gateways": [],
            "lost_gateways": [],
            "replicas": [],
            "pools": [],
            "tenants": [],
            "report": {},
            "point": POINT,
        }
        self._history_s = 0.0
        self._histories: dict[str, list[Point]] = {}
        self._shared = SharedLook(self._look)

    async def look(self) -> bytes:
        """What there is, as JSON; the same object until it looks again. If the store is away, what this gateway knows,
        and what was seen last."""
        return await self._shared.get(max(_EVERY_S, _EVERY_S_A_REPLICA * len(self._seen["replicas"])))

    async def _look(self) -> dict[str, Any]:
        _, ready = self._status.readiness()
        told: dict[str, Any] = {
            "time_ms": int(time.time() * 1000),
            "gateway": self._status.gateway,
            "version": self._status.about["version"],
            "store": ready["store"],
            "models": self._status.models(),
            "models_of_pools": self._status.models_of_pools(),
            "backends": ready.get("models", {}),
            "weights": ready.get("weights", "exact"),
            "problems": problems_in(ready),
            "is_of_now": True,
        }
        try:
            told |= await answered(self._look_at_store(), _WITHIN_S) | {"seen_ms": told["time_ms"]}
        except (StoreError, ApiError) as error:
            told["problems"].append({"where": "store", "what": f"what is shown here is not of now: {error}"})
            told["is_of_now"] = False
            told |= _without_store(ready, self._seen["gateways"], self._seen["replicas"])
        found = told.get("report", {}).get("conditions", {})
        told["problems"] += [{"where": "store", "what": words} for words in found.values()]
        self._seen |= told
        return self._seen

    async def _look_at_store(self) -> dict[str, Any]:
        pools = [self._store.pool(name) for name in sorted(self._store.pool_names())]
        await asyncio.gather(*(pool.read_figures() for pool in pools))
        replicas = await self._operations.replicas()
        if time.monotonic() - self._history_s >= EVERY_S:
            self._histories = {pool.name: await read_history(pool) for pool in pools}
            self._history_s = time.monotonic()
        queue = await self._operations.queue()
        return {
            "store_ms": max((pool.state.now_ms for pool in pools if pool.state is not None), default=0),
            "gateways": await _gateways(pools),
            "lost_gateways": await _lost(pools),
            "replicas": [each | _figures(self._store.pool(each["pool"]), each["id"]) for each in replicas],
            "pools": [each | {"history": self._histories.get(each["pool"], [])} for each in queue["pools"]],
            "tenants": await self._operations.tenants(),
            "report": await read_report(self._store.ask),
        }


async def _gateways(pools: list[Pool]) -> list[dict[str, Any]]:
    """Each gateway that some pool knows, by name, and whether its lease is good."""
    found: dict[str, bool] = {}
    for pool in pools:
        flat = await pool.read("HGETALL", pool.keys.gateways)
        now_ms = pool.state.now_ms if pool.state is not None else 0
        for name, text in zip(flat[::2], flat[1::2], strict=True):
            _, _, until = readable(text).partition(" ")
            is_good = is_number(until) and int(until) >= now_ms
            found[readable(name)] = found.get(readable(name), False) or is_good
    return [{"id": name, "is_alive": found[name]} for name in sorted(found)[:_MOST_GATEWAYS]]


async def _lost(pools: list[Pool]) -> list[dict[str, Any]]:
    """Gateways whose leases ran out lately and that are not back, the last one first."""
    found: dict[str, int] = {}
    for pool in pools:
        for name, at_ms in (await read_lost(pool)).items():
            found[name] = max(at_ms, found.get(name, 0))
    last = sorted(found.items(), key=lambda each: -each[1])
    return [{"id": name, "at_ms": at_ms} for name, at_ms in last[:_MOST_GATEWAYS]]


def _without_store(
    ready: dict[str, Any], gateways: list[dict[str, Any]], replicas: list[dict[str, Any]]
) -> dict[str, Any]:
    """What was seen last, and what this gateway knows without the store: which replicas answer. It knows nothing now of
    other gateways, and of agents."""
    own, names = str(ready["gateway"]), {str(each["id"]) for each in gateways}
    states = dict.fromkeys(ready["replicas"], "ready") | dict.fromkeys(ready.get("not_ready", ()), "not ready")
    seen = {str(each["id"]): each for each in replicas}
    known = {name: seen.get(name, {"id": name}) for name in sorted(seen.keys() | states.keys())}
    return {
        "gateways": [{"id": name, "is_alive": True if name == own else None} for name in sorted(names | {own})],
        "replicas": [
            each | {"state": states.get(name, each.get("state", "not known")), "agent": "not known"}
            for name, each in known.items()
        ],
    }


def _figures(pool: Pool, replica: str) -> dict[str, Any]:
    """What the engine and the cluster tell of a replica besides its load."""
    engine, state = pool.figures.engines.get(replica, {}), pool.state
    return {
        "breaker_open": state is not None and state.has_open_breaker(replica),
        "agent": _agent(state, replica),
        "kv_usage": engine.get("kv_usage"),
        "engine_waiting": engine.get("waiting"),
    }


def _agent(state: PoolState | None, replica: str) -> str:
    """What the replica's agent is: `none`, `gone` (its lease has run out), `relearning`, `exact`, or a mode in which
    events cannot confirm what it holds: `partial`, `unconfirmed`."""
    agent = state.agents.get(replica) if state is not None else None
    if state is None or agent is None or agent.mode == "none":
        return "none"
    if agent.mode not in TOLD:
        return UNCONFIRMED
    if not state.is_told(replica):
        return "gone"
    if not state.is_exact(replica):
        return PARTIAL
    return "relearning" if agent.is_relearning else "exact"


def problems_in(ready: dict[str, Any]) -> list[dict[str, str]]:
    """What is wrong, in words: the worst first."""
    found = [{"where": "gateway", "what": reason} for reason in ready["reasons"]]
    if "store_problem" in ready:
        found.append({"where": "store", "what": ready["store_problem"]})
    found += [{"where": f"replica {name}", "what": what} for name, what in ready.get("not_ready", {}).items()]
    answering = ready.get("answered_by_fallback", {})
    found += [
        {
            "where": f"model {name}",
            "what": "no replica is ready for it"
            + (f"; {', '.join(answering[name])} may answer" if name in answering else ""),
        }
        for name in ready.get("models_down", ())
    ]
    found += [
        {"where": f"model {name}", "what": f"no replica serves its fallback {', '.join(fallbacks)}"}
        for name, fallbacks in ready.get("unknown_fallbacks", {}).items()
    ]
    found += [
        {"where": f"model {name}", "what": f"replicas of several pools share its requests: {', '.join(pools)}"}
        for name, pools in ready.get("models_in_several_pools", {}).items()
    ]
    found += [
        {"where": f"model {name}", "what": f"no replica is ready for the backend {', '.join(backends)}"}
        for name, backends in ready.get("backends_without_replicas", {}).items()
        if name not in ready.get("models_down", ())
    ]
    found += [
        {"where": f"replica {name}", "what": "its id belongs to another engine"} for name in ready.get("taken_ids", ())
    ]
    return found
