"""Starts what a run needs: a Redis, light replicas with their agents, and gateways before them."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.embedded import embedded_redis
from bench.fleet.endpoints import NAMESPACE, SERVICE, TOKEN
from bench.fleet.gateways import running_gateways
from bench.fleet.parts import CLIENTS, GATEWAYS, REPLICAS, Meter
from bench.fleet.replicas import LightReplicas, light_replicas
from bench.fleet.settings import LightSettings

_CONFIG: dict[str, Any] = {
    # The engines' queues hold the requests, and not the gateways.
    "limits": {"max_in_flight": 65_536},
    # The default is 1 s, but here one process answers for all replicas, and each gateway checks all of them at once.
    "health": {"timeout_s": 5},
    # In stretched time, long answers take longer than the defaults permit.
    "timeouts": {"first_byte_s": 3600, "idle_s": 3600, "request_s": 7200, "grace_s": 2.5},
}
"""What gateways are configured with, beside their replicas and Redis."""


@dataclass(frozen=True)
class Stage:
    """A fleet that serves."""

    fleet: LightReplicas
    settings: LightSettings
    gateway_urls: list[str]
    """Empty without gateways."""
    redis_url: str
    meter: Meter


@contextmanager
def stage(
    workers: int, gateways: int, settings: LightSettings, policy: str | None = None, discovers: bool = False
) -> Iterator[Stage]:
    """A fleet of this size with empty caches. Without gateways, the workers have no agents either. Gateways that
    discover have only r0 in their configuration, and follow `fleet.publish`."""
    _raise_open_files()
    with embedded_redis() as redis_url, light_replicas(workers, settings, redis_url if gateways else "") as fleet:
        pids = {REPLICAS: [fleet.pid], CLIENTS: []}
        if not gateways:
            yield Stage(fleet, settings, [], redis_url, Meter(pids, redis_url))
            return
        config = _CONFIG | ({"policy": {"name": policy}} if policy else {})
        with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
            if discovers:
                config |= {"discovery": _discovery(fleet, Path(folder))}
            listed = {"r0": fleet.urls["r0"]} if discovers else fleet.urls
            with running_gateways(gateways, listed, workers, redis_url, config) as running:
                pids[GATEWAYS] = [each.process.pid for each in running]
                yield Stage(fleet, settings, [each.url for each in running], redis_url, Meter(pids, redis_url))


def _discovery(fleet: LightReplicas, account: Path) -> dict[str, Any]:
    """The gateways' section `discovery`. `account` is an empty folder."""
    (account / "token").write_text(TOKEN)
    return {
        "kubernetes": {
            "service": SERVICE,
            "namespace": NAMESPACE,
            "api_url": fleet.api_url,
            "service_account": str(account),
        }
    }


def _raise_open_files() -> None:
    """Let this process and its children have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
