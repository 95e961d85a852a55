"""`kvgate coordinator`: applies event streams, reaps leases and watches the store. It serves no requests."""

from __future__ import annotations

import asyncio
import secrets

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from coordinator.chores.applier import Appliers
from coordinator.known_pools import known_pools
from coordinator.store import Store, StoreOptions
from coordinator.watch.watch_session import WatchSettings
from coordinator.watch.watcher import Watcher
from gateway.metrics.gateway_metrics import EventMetrics
from gateway.metrics.store_metrics import StoreMetrics
from gateway.tasks import Tasks

_log = structlog.get_logger("kvgate.coordinator")

_LOOK_S = 1.0


async def run(redis_url: str, namespace: str, metrics_port: int, watch: WatchSettings) -> None:
    """Runs until cancelled, and finds new pools within a second. Raises OSError if `metrics_port` is taken."""
    name = f"coordinator.{secrets.token_hex(3)}"
    registry, tasks = CollectorRegistry(), Tasks()
    if metrics_port:
        start_http_server(metrics_port, registry=registry)
    store = Store(StoreOptions(redis_url, budget_s=1.0, namespace=namespace), name, does_chores=False)
    appliers = Appliers(redis_url, name, store.pool_names, EventMetrics(registry).applied, namespace)
    watcher = Watcher(redis_url, name, watch)
    StoreMetrics(watcher, registry)
    try:
        tasks.spawn(store.run(), "store")
        tasks.spawn(appliers.run(), "appliers")
        tasks.spawn(watcher.run(), "watcher")
        await store.first_attempt()
        _log.info("coordinator started", id=name, store=store.reason or "up")
        while True:
            for pool in await known_pools(store):
                store.pool(pool)
            await asyncio.sleep(_LOOK_S)
    finally:
        await store.leave()
        await tasks.close()
