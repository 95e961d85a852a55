"""The status of a gateway: whether it is ready, its version and settings, and its gauges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import unquote

from coordinator.errors import StoreError
from coordinator.maintenance.repair import KINDS
from coordinator.pool.demand import read_demand
from coordinator.redis.time_limit import answered
from coordinator.store import Store
from coordinator.watch.watcher import Watcher
from gateway import __version__
from gateway.control.budgets import BudgetView
from gateway.metrics.gateway_metrics import Metrics
from gateway.records.file_keys import FileKeys
from gateway.records.record_book import RecordBook
from gateway.relay.pairs.recent_legs import RecentLegs
from gateway.reload import Reload
from gateway.replicas.discovery.added import ADDED
from gateway.replicas.discovery.discovery import LISTED, Discovery
from gateway.replicas.fleet import Fleet
from gateway.replicas.member import CHANGING, Member
from gateway.replicas.model_states import ModelStates, model_states
from gateway.request.admission import Admission
from gateway.request.objectives import Objectives
from gateway.settings.gateway_settings import GatewaySettings

_MOST_NAMES = 100
_FIGURES_S = 1.0
"""How long a scrape waits for the store."""


class Status:
    """The status of this gateway, gathered from its parts."""

    def __init__(
        self,
        gateway: str,
        settings: GatewaySettings,
        *,
        reload: Reload,
        store: Store,
        records: RecordBook,
        file_keys: FileKeys,
        watcher: Watcher,
        fleet: Fleet,
        discovery: Discovery,
        objectives: Objectives,
        admission: Admission,
        metrics: Metrics,
        budgets: BudgetView,
        recent_legs: RecentLegs,
    ) -> None:
        self.gateway = gateway
        self._reload = reload
        self._records, self._file_keys = records, file_keys
        self._watcher = watcher
        self.about: dict[str, Any] = {"version": __version__}
        """Should be the same for all gateways of a cluster. The settings are a digest of each section."""
        self.use(settings)
        self._admission = admission
        self._store = store
        self._fleet = fleet
        self._discovery, self._objectives = discovery, objectives
        self._metrics = metrics
        self._budgets = budgets
        self._recent_legs = recent_legs
        self.is_draining = False

    def use(self, settings: GatewaySettings) -> None:
        """These are the gateway's settings from now on."""
        self.about["settings"] = settings.fingerprint()
        self._pairs_protocol = settings.pairs.protocol
        self._hold_s = settings.queue.hold_s
        self._prefill_tokens_per_s = settings.queue.prefill_tokens_per_s
        self._slots = settings.policy.max_active_requests

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether this gateway can serve, and the body of /ready."""
        ready = self._fleet.ready_replicas()
        reasons = self._reasons(ready)
        body = {
            "ready": not reasons,
            "gateway": self.gateway,
            "store": "up" if self._store.is_up() else "fallback",
            "replicas": ready,
            "exact": [name for name in ready if self._fleet.is_exact(name)],
            "pools": sorted(self._fleet.pools()),
            "reasons": reasons,
        }
        body |= {name: told for name, told in self._asides(ready).items() if told}
        return not reasons, body

    def is_ready(self) -> bool:
        """Whether this gateway can serve: for those who ask often."""
        return not self._reasons(self._fleet.ready_replicas())

    def _reasons(self, ready: list[str]) -> list[str]:
        """Why this gateway cannot serve; empty if it can. It stays ready when only the store is lost: then it routes by
        the fallback rule to the replicas that it knows."""
        reasons = []
        if self.is_draining:
            reasons.append("this gateway is shutting down")
        is_holding = bool(self._hold_s and self._fleet.known)  # clients must reach it, so that replicas are started
        if not ready and not is_holding and (self._store.is_up() or not self._fleet.served):
            reasons += [f"replica {name}: {problem}" for name, problem in self._fleet.problems().items()]
            reasons += [f"{source}: {problem}" for source, problem in self._discovery.problems().items() if problem]
            reasons = reasons or ["no replica is known: configure `replicas` or `discovery`"]
        return reasons

    def _asides(self, ready: list[str]) -> dict[str, Any]:
        """What /ready tells only if there is something to tell."""
        fleet, states, report = self._fleet, model_states(self._fleet), self._watcher.report
        conditions = report.conditions if report is not None else {}
        return {
            "models_down": list(states.down)[:_MOST_NAMES],
            "answered_by_fallback": _some(states.answered_by_fallback),
            "unknown_fallbacks": _some(states.unknown_fallbacks),
            "models_in_several_pools": _some(states.in_several_pools),
            "models": _shown(states),
            "backends_without_replicas": _some(states.without_replicas),
            "models_without_price": self._budgets.models_without_price(self.models())[:_MOST_NAMES],
            "weights": "approximate" if self._are_weights_approximate(states) else "",
            "not_ready": fleet.problems(),
            "pairs_protocol": self._pairs_protocol if fleet.has_roles else "",
            "failing_prefills": _some(self._recent_legs.failing()),
            "draining": [member.id for member in fleet.targets if fleet.is_draining(member.id)],
            "asleep": [member.id for member in fleet.targets if fleet.is_asleep(member.id)],
            "breaker_open": [member.id for member in fleet.targets if self._has_open_breaker(member)],
            "taken_ids": fleet.taken_ids(),
            "sources": {name: source for name, source in self._discovery.sources.items() if source != LISTED},
            "added_not_used": {name: each.why for name, each in self._discovery.outranked.get(ADDED, {}).items()},
            "labels": {each.id: labels for each in fleet.targets if (labels := each.labels_in_force)},
            "config_problems": self._reload.problems[:_MOST_NAMES],
            "needs_a_restart": self._reload.left,
            "has_older_keys": self._file_keys.is_older,
            "ignored_records": _some(dict(sorted(self._records.ignored.items()))),
            "records_to_sign": len(self._records.other_signatures),
            "store_problem": "" if self._store.is_up() else self._store.reason,
            "store_conditions": list(conditions),
            "store_warnings": list(conditions.values()),
        }

    def _are_weights_approximate(self, states: ModelStates) -> bool:
        """Whether a model has several backends, and nobody counts its requests over all gateways."""
        counts = self._store.has_one_slot and self._store.is_up()
        return not counts and any(len(backends) > 1 for backends in states.backends.values())

    def _has_open_breaker(self, member: Member) -> bool:
        """As the store has told. While it is away, nobody knows."""
        if not self._store.is_up() or not member.pool or member.identity.is_taken:
            return False
        state = self._store.pool(member.pool).state
        return state is not None and state.has_open_breaker(member.id)

    def models(self) -> list[str]:
        """The names of the models that are served."""
        return [str(card["id"]) for card in self._fleet.model_cards()]

    def models_of_pools(self) -> dict[str, list[str]]:
        """Pool → the names of the models that are served there, at most _MOST_NAMES: base models first."""
        found: dict[str, list[str]] = {}
        served = [(each.adapter is not None, name, each.pool) for name, of in self._fleet.served.items() for each in of]
        for _, name, pool in sorted(served):
            if len(names := found.setdefault(pool, [])) < _MOST_NAMES:
                names.append(name)
        return found

    async def refresh_gauges(self) -> None:
        """Set the gauges whose values are kept elsewhere; called for each scrape. Replicas' figures are read from the
        store now: they change all the time, and only scrapes need them. While it is away, they are those read last."""
        reads = (self._store.pool(name).read_figures() for name in self._store.pool_names())
        with suppress(StoreError):
            await answered(asyncio.gather(*reads), _FIGURES_S)
        self._set_gauges()
        with suppress(StoreError):
            await answered(self._set_demand(), _FIGURES_S)
        with suppress(StoreError):
            await answered(self._set_budgets(), _FIGURES_S)

    async def _set_budgets(self) -> None:
        """The budgets of which most is spent, exposed by every gateway: all say the same."""
        used = await self._budgets.used(_MOST_NAMES)
        self._metrics.budget_used.clear()
        self._metrics.budget_soft.clear()
        for budget, part in used:
            labels = unquote(budget.account), budget.per, budget.unit
            self._metrics.budget_used.labels(*labels).set(part)
            self._metrics.budget_soft.labels(*labels).set(budget.soft)

    async def _set_demand(self) -> None:
        """The demand of the pools whose maintenance this gateway does: so each pool's is exposed once."""
        for gauge in self._metrics.demand.values():
            gauge.clear()
        for name in self._store.pool_names():
            pool = self._store.pool(name)
            if pool.is_worker:
                demand = await read_demand(pool.run, self._prefill_tokens_per_s)
                self._metrics.set_demand(name, demand, self._slots)

    def _set_gauges(self) -> None:
        metrics = self._metrics
        metrics.ignored_records.set(len(self._records.ignored))
        metrics.store_up.set(self._store.is_up())
        metrics.gateway_ready.set(self.is_ready())
        metrics.in_flight.set(self._admission.requests.taken)
        metrics.uploads.set(self._admission.uploads.taken)
        metrics.held_bytes.set(self._admission.held_bytes.taken)
        pools = [self._store.pool(name) for name in self._store.pool_names()]
        for kind in KINDS:
            metrics.unreadable.inc(kind, by=sum(pool.unreadable.pop(kind, 0) for pool in pools))
        metrics.maintenance_lag_s.clear()
        for each in pools:
            metrics.queue_waiting.labels(each.name).set(each.waiting + each.held.requests)
            if each.maintenance_lag_s is not None:
                metrics.maintenance_lag_s.labels(each.name).set(each.maintenance_lag_s)
        states = model_states(self._fleet)
        metrics.models_down.set(len(states.down))
        metrics.models_in_several_pools.set(len(states.in_several_pools))
        metrics.backends.set_states(states.backends)
        metrics.discovery_up.clear()
        for source, problem in (self._discovery.problems() | self._objectives.problems()).items():
            metrics.discovery_up.labels(source).set(not problem)
        for gauge in metrics.per_replica:
            gauge.clear()  # replicas that were removed, or tell nothing any more, must not keep old values
        metrics.keep({*self._fleet.members, *(replica for pool in pools for replica in pool.records)})
        taken = self._fleet.taken_ids()
        for member in self._fleet.targets:
            metrics.replica_info.labels(member.id, member.pool, member.role or CHANGING).set(1)
            for counter in (metrics.doubts, metrics.passed_over_tokens):
                counter.inc(member.id, by=0)  # 0 at first: increase() needs a start
            metrics.replica_ready.labels(member.id).set(self._fleet.is_ready(member.id))
            metrics.replica_draining.labels(member.id).set(self._fleet.is_draining(member.id))
            metrics.replica_asleep.labels(member.id).set(self._fleet.is_asleep(member.id))
            metrics.replica_id_taken.labels(member.id).set(member.id in taken)
            pool = self._store.pool(member.pool) if member.pool else None
            if pool is not None and pool.state is not None and not member.identity.is_taken:
                metrics.breaker_open.labels(member.id).set(self._has_open_breaker(member))
                metrics.replica_active.labels(member.id).set(pool.figures.active.get(member.id, 0))
                metrics.replica_exact.labels(member.id).set(self._fleet.is_exact(member.id))
                is_told = pool.state.has_agent(member.id)  # else they are old
                for name, figure in pool.figures.engines.get(member.id, {}).items():
                    if name in metrics.engine and is_told:
                        metrics.engine[name].labels(member.id).set(figure)


def _some(found: Mapping[str, Any]) -> dict[str, Any]:
    """The first ones of many."""
    return dict(islice(found.items(), _MOST_NAMES))


def _shown(states: ModelStates) -> dict[str, dict[str, dict[str, int]]]:
    """The configured models, each with its backends."""
    shown = _some(states.backends)
    return {model: {name: each._asdict() for name, each in backends.items()} for model, backends in shown.items()}
