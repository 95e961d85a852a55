"""Starts what a run needs: a Redis, light replicas with their agents, and gateways before them."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.embedded import embedded_redis
from bench.fleet.endpoints import NAMESPACE, SERVICE, TOKEN
from bench.fleet.gateways import NotReady, running_gateways
from bench.fleet.parts import GATEWAYS, REPLICAS, Meter
from bench.fleet.replicas import LightReplicas, light_replicas
from bench.fleet.settings import LightSettings
from bench.peers import PEERS, running_peer
from gateway.settings.policies import DEFAULT_POLICY

_CONFIG: dict[str, Any] = {
    # The engines' queues hold the requests, and not the gateways.
    "limits": {"max_in_flight": 65_536},
    # The default is 1 s, but here one process answers for all replicas, and each gateway checks all of them at once.
    "health": {"timeout_s": 5},
    # On a machine that also runs the replicas and the clients, a placement may have to wait for a core.
    "redis": {"budget_ms": 200},
    # In stretched time, long answers take longer than the defaults permit.
    "timeouts": {"first_byte_s": 3600, "idle_s": 3600, "request_s": 7200, "grace_s": 2.5},
}
"""What gateways are configured with, beside their replicas and Redis."""
_FILES_PER_WORKER = 4
"""The open files of a worker without gateways: its sockets, its agent's connection, and a client's."""


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
    workers: int, gateways: int, settings: LightSettings, system: str = DEFAULT_POLICY, discovers: bool = False
) -> Iterator[Stage]:
    """A fleet of this size with empty caches. `system` is a policy of KVGate, or a peer's router, of which `gateways`
    run without knowing of each other. Only KVGate's workers have agents. Gateways that discover have only r0 in their
    configuration, and follow `fleet.publish`."""
    _raise_open_files(workers, gateways)
    is_kvgate = gateways > 0 and system not in PEERS
    with (
        embedded_redis() as redis_url,
        light_replicas(workers, settings, redis_url if is_kvgate else "") as fleet,
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        ExitStack() as stack,
    ):
        if is_kvgate:
            config = _CONFIG | {"policy": {"name": system}}
            if discovers:
                config |= {"discovery": _discovery(fleet, Path(folder))}
            listed = {"r0": fleet.urls["r0"]} if discovers else fleet.urls
            processes = stack.enter_context(running_gateways(gateways, listed, workers, redis_url, config))
            routers = [(each.url, each.process.pid) for each in processes]
        else:
            urls = list(fleet.urls.values())
            started = (running_peer(PEERS[system], urls, settings.served_name) for _ in range(gateways))
            routers = [stack.enter_context(each) for each in started]
        pids = {REPLICAS: [fleet.pid], GATEWAYS: [pid for _, pid in routers]}
        yield Stage(fleet, settings, [url for url, _ in routers], redis_url, Meter(pids, redis_url))


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


def _raise_open_files(workers: int, gateways: int) -> None:
    """Let this process and its children have as many connections as the system allows. Raises NotReady if these are too
    few: all workers are in one process, and each gateway keeps a connection to each of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = workers * (gateways + _FILES_PER_WORKER)
    if needed > most:
        raise NotReady(f"the workers need {needed} open files, and this machine allows {most} (ulimit -Hn)")
