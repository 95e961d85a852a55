"""The systems that route: a simple rule in the client, KVGate's gateways with one of its policies or its pickers, or
another router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import envoy
from bench.cluster import running_gateways
from bench.envoy import NOTHING, PASSES, running_envoy
from bench.fleet.gateways import running_gateways as before_light_replicas
from bench.load import Spread, pinned_spread, random_spread
from bench.peers import PEERS, Peer, running_peer
from bench.pickers import running_pickers
from bench.routing.fleets import Fleet
from bench.workloads import Session
from gateway.settings.policies import DEFAULT_POLICY, POLICIES

OURS = DEFAULT_POLICY


def _tight(peer: Peer) -> Peer:
    """The router with a setting for a low number of requests. By default it leaves its affinity when one replica has 64
    requests more than another, which never happens with these few clients."""
    options = ("--balance-abs-threshold", "2")
    return replace(peer, name=f"{peer.name}-tight", command=lambda *of: [*peer.command(*of), *options])


_AS_THEY_COME = ("sglang-router", "vllm-router")
ROUTERS = {peer.name: peer for name in _AS_THEY_COME for peer in (PEERS[name], _tight(PEERS[name]))}
# On a machine that also runs the replicas and the clients, a placement may have to wait for a core.
_CONFIG = {"redis": {"budget_ms": 200}}

Start = Callable[[Fleet, Sequence[Session], int], AbstractAsyncContextManager[Spread]]
"""Starts a system for a fleet, the coming sessions and a seed."""


def label(name: str, instances: int) -> str:
    """The shown name of a system."""
    shown = "KVGate" if name == OURS else f"KVGate, {name}" if name in (*POLICIES, *PICKERS) else name
    return f"{shown} x{instances}" if instances > 1 else shown


@dataclass(frozen=True)
class System:
    """A system that routes, with its number of parallel instances. 0: clients talk to replicas directly."""

    name: str
    instances: int
    start: Start

    @property
    def label(self) -> str:
        return label(self.name, self.instances)

    @property
    def missing(self) -> str:
        """How to install the router or the Envoy that it needs; empty if it can run."""
        if self.name in ROUTERS and not ROUTERS[self.name].is_installed:
            return "python -m bench.overhead --install installs it"
        return envoy.missing() if self.name in PICKERS else ""


@asynccontextmanager
async def _pinned(fleet: Fleet, sessions: Sequence[Session], _seed: int) -> AsyncIterator[Spread]:
    yield pinned_spread(list(fleet.urls.values()), sessions)


def _kvgate(policy: str, gateways: int) -> Start:
    @asynccontextmanager
    async def start(fleet: Fleet, _sessions: Sequence[Session], seed: int) -> AsyncIterator[Spread]:
        config = _CONFIG | fleet.config
        if fleet.redis_url is None:
            with running_gateways(
                fleet.urls, gateways=gateways, policy=policy, config=config, beside=fleet.beside
            ) as cluster:
                yield random_spread(cluster.gateway_urls, seed)
            return
        config |= {"policy": {"name": policy}}
        with before_light_replicas(gateways, fleet.urls, len(fleet.urls), fleet.redis_url, config) as started:
            yield random_spread([gateway.url for gateway in started], seed)

    return start


def _pickers(pickers: int, gateways: int, changes: Mapping[str, str]) -> Start:
    """An Envoy that asks pickers, and gateways beside it. Each of all these gets as many requests."""

    @asynccontextmanager
    async def start(fleet: Fleet, _sessions: Sequence[Session], seed: int) -> AsyncIterator[Spread]:
        config = _CONFIG | fleet.config
        with (
            TemporaryDirectory(prefix="kvgate-") as folder,
            running_gateways(
                fleet.urls, gateways=max(1, gateways), config=config, redis_url=fleet.redis_url, beside=fleet.beside
            ) as cluster,
            running_pickers(cluster, Path(folder), pickers) as asked,
            running_envoy(asked, Path(folder), changes) as running,
        ):
            if not gateways:
                cluster.gateway_processes[0].stop()  # only its file was needed
            yield random_spread([running.url] * pickers + cluster.gateway_urls[:gateways], seed)

    return start


_MIXED = "pickers_and_gateways"
PICKERS: Mapping[str, Callable[[int], Start]] = {
    "pickers": lambda count: _pickers(count, 0, NOTHING),
    "pickers_answers_pass": lambda count: _pickers(count, 0, PASSES),
    _MIXED: lambda count: _pickers((count + 1) // 2, count // 2, NOTHING),
}
"""Systems of so many pickers, or of pickers and gateways."""


def _router(peer: Peer, instances: int) -> Start:
    @asynccontextmanager
    async def start(fleet: Fleet, _sessions: Sequence[Session], seed: int) -> AsyncIterator[Spread]:
        with ExitStack() as stack:
            upstreams = list(fleet.urls.values())
            urls = [stack.enter_context(running_peer(peer, upstreams, fleet.model))[0] for _ in range(instances)]
            yield random_spread(urls, seed)

    return start


def systems(names: Sequence[str], gateways: Sequence[int]) -> list[System]:
    """The systems by name. prefix_kv_aware and pickers come with each number of gateways. Routers with their defaults
    come with one instance and with two. All others come once.

    Raises KeyError for an unknown name.
    """
    found: list[System] = []
    for name in names:
        if name == "pinned":
            found.append(System(name, 0, _pinned))
        elif name in ROUTERS:
            instances = (1, 2) if name in _AS_THEY_COME else (1,)
            found += [System(name, count, _router(ROUTERS[name], count)) for count in instances]
        elif name in POLICIES:
            found += [System(name, count, _kvgate(name, count)) for count in (gateways if name == OURS else (1,))]
        else:
            least = 2 if name == _MIXED else 1
            found += [System(name, count, PICKERS[name](count)) for count in gateways if count >= least]
    return found


NAMES = ("pinned", *POLICIES, *PICKERS, *ROUTERS)
