"""A cluster for faults: Redis, three simulated replicas with agents, and gateways.

A larger fleet has light replicas beside these three (bench/fleet/replicas.py), with their agents in one process that no
fault strikes. All others are separate processes, started here so that each link can lead through a proxy. Only links
that a fault strikes have a proxy, because a proxy takes core time that gateways could use.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import yaml

from bench.cluster import KVGATE
from bench.faults.balancer import Balancer
from bench.faults.load import DECODE_S, client
from bench.faults.program import Program, end_all
from bench.faults.proxy import Proxy
from bench.faults.redis import Line, Redis, Sentinels, until
from bench.faults.verdicts import Strike
from bench.fleet.replicas import light_replicas
from bench.fleet.settings import LightSettings
from bench.streams import STREAMS
from coordinator.keys import PoolKeys
from gateway.ops.local.ports import free_ports

REPLICAS = ("r0", "r1", "r2")
POOL = "kvgate-sim-vlm-63845a77"
"""The pool of the simulator's default model."""
SETTINGS: dict[str, Any] = {"log": {"level": "warning"}}
"""The gateways' settings that differ from the defaults in every run."""
NO_MORE: Mapping[str, Any] = MappingProxyType({})
_READY_WITHIN_S = 60.0
_STEPPED = (sys.executable, "-m", "bench.faults.stepped_clock")


@dataclass(frozen=True, slots=True)
class Layout:
    """A fault's needs besides gateways, replicas, agents and one Redis."""

    sentinels: bool = False
    stepped_clock: bool = False
    proxied: tuple[str, ...] = ()
    """Links with a proxy: `clients` (to each gateway), `store` (from all to Redis), `gateway-store` and `agent-store`
    (from gateway 0 and from r0's agent to Redis), `replica` (from gateway 0 to r0)."""


class Stage:
    """Gateways by number, replicas and agents by the replica's id. `strikes` says what was held, and until when."""

    def __init__(
        self, folder: Path, gateways: int, layout: Layout, replicas: int, settings: Mapping[str, Any] = NO_MORE
    ) -> None:
        """`settings`: of the gateways, beside those of every run."""
        self.layout = layout
        self._settings = {**SETTINGS, **settings}
        self.keys = PoolKeys(POOL)
        self.redis = Redis(folder)
        self.sentinels = Sentinels(folder) if layout.sentinels else None
        self.strikes: list[Strike] = []
        self.proxies: dict[str, Proxy] = {}
        self._folder = folder
        self._num_light = 0 if layout.stepped_clock else replicas - len(REPLICAS)
        self._light: dict[str, str] = {}
        """The URLs of the light replicas, by id."""
        self._light_process = ExitStack()
        ports = free_ports(gateways + len(REPLICAS))
        self._gateway_ports = ports[:gateways]
        self._replica_ports = dict(zip(REPLICAS, ports[gateways:], strict=True))
        self.urls = [f"http://127.0.0.1:{port}" for port in self._gateway_ports]
        """Past the proxies."""
        self.gateways: list[Program] = []
        self.replicas: dict[str, Program] = {}
        self.agents: dict[str, Program] = {}
        self.http: aiohttp.ClientSession
        self.balancer: Balancer

    @property
    def line(self) -> Line:
        """A connection to Redis past the proxies."""
        return self.sentinels.line if self.sentinels else self.redis.line

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def strike(self, for_s: float, gateways: tuple[int, ...] = (), replicas: tuple[str, ...] = ()) -> None:
        """Records that these are held from now on. verdicts.py decides what that excuses."""
        at_s = self.now_s()
        self.strikes.append(Strike(at_s, at_s + for_s, frozenset(gateways), frozenset(replicas)))

    async def fail(self, replica: str, mode: str, **details: int) -> None:
        """Uses a failure mode of gateway/simulator/faults.py."""
        body = {"mode": mode, **details}
        async with self.http.post(f"{self.replica_url(replica)}/sim/fail", json=body) as answer:
            answer.raise_for_status()

    # -- readiness -----------------------------------------------------------------------------------------------

    async def told(self, gateway: int) -> dict[str, Any]:
        """A gateway's /ready. Empty if it does not answer within a second."""
        try:
            async with asyncio.timeout(1.0), self.http.get(f"{self.urls[gateway]}/ready") as answer:
                told: dict[str, Any] = await answer.json()
                return told
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return {}

    async def not_exact(self, gateway: int) -> str:
        """Why this gateway does not decide exactly on every replica. Empty if it does."""
        told = await self.told(gateway)
        if not told:
            return f"gateway {gateway} does not answer"
        if told["store"] != "up":
            return f"gateway {gateway} has no store"
        missing = {*REPLICAS, *self._light} - set(told["exact"])
        return f"gateway {gateway} is not exact on {', '.join(sorted(missing))}" if missing else ""

    async def is_exact(self, gateway: int) -> bool:
        return not await self.not_exact(gateway)

    async def gateway_is_ready(self, gateway: int) -> bool:
        return bool((await self.told(gateway)).get("ready"))

    async def replica_answers(self, replica: str) -> bool:
        try:
            async with asyncio.timeout(1.0), self.http.get(f"{self.replica_url(replica)}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def replica_url(self, replica: str) -> str:
        """Past the proxies."""
        return f"http://127.0.0.1:{self._replica_ports[replica]}"

    # -- starting and ending -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises TimeoutError if a process does not start, and OSError."""
        await (self.sentinels or self.redis).start()
        urls = await self._store_urls()
        self._name_replicas()
        for replica in self.replicas.values():
            replica.start()
        for name in REPLICAS:
            await self.until(lambda name=name: self.replica_answers(name), f"replica {name}")  # type: ignore[misc]
        served = await self._proxied("replica", self._replica_ports["r0"], lambda: {self.gateways[0].pid})
        self._name_agents(urls)
        await self._start_light(urls(""))
        self._name_gateways(urls, served)
        for program in (*self.agents.values(), *self.gateways):
            program.start()
        for gateway in range(len(self.gateways)):
            await self.until(lambda gateway=gateway: self.is_exact(gateway), f"gateway {gateway}")  # type: ignore[misc]
        ports = [await self._proxied("clients", port) for port in self._gateway_ports]
        self.balancer = Balancer([f"http://127.0.0.1:{port}" for port in ports])

    async def until(self, condition: Callable[[], Any], what: str, within_s: float = _READY_WITHIN_S) -> None:
        await until(condition, within_s, what)

    async def _proxied(self, link: str, port: int, pids: Callable[[], set[int]] | None = None) -> int:
        """The port to use. It is a proxy's port if this link has a proxy. If several proxies share a name, faults
        strike the first."""
        if link not in self.layout.proxied:
            return port
        proxy = Proxy("127.0.0.1", port, pids)
        await proxy.start()
        self.proxies.setdefault(link, proxy)
        self.proxies[f"{link} {port}"] = proxy
        return proxy.port

    async def _store_urls(self) -> Callable[[str], str]:
        """Returns a function from a link's name to the URL of Redis on that link."""
        if self.sentinels is not None:
            url = self.sentinels.url
            return lambda _: url
        every = await self._proxied("store", self.redis.port)
        ports = {link: await self._proxied(link, every) for link in ("gateway-store", "agent-store")}
        return lambda link: f"redis://127.0.0.1:{ports.get(link, every)}/0"

    def _program(self, name: str, *arguments: str) -> Program:
        base = _STEPPED if self.layout.stepped_clock else KVGATE
        return Program(name, (*base, *arguments), self._folder / f"{name}.log")

    def _name_replicas(self) -> None:
        for name, port in self._replica_ports.items():
            options = ("--id", name, "--port", str(port), "--decode-s-per-token", str(DECODE_S))
            self.replicas[name] = self._program(name, "replica-sim", *options)

    async def _start_light(self, redis_url: str) -> None:
        """Their agents run when this returns. They may reach Redis through a proxy of this process."""
        if self._num_light > 0:
            settings = LightSettings(decode_s_per_token=DECODE_S)
            started = light_replicas(self._num_light, settings, redis_url, first=len(REPLICAS))
            self._light = (await asyncio.to_thread(self._light_process.enter_context, started)).urls

    def _name_agents(self, store: Callable[[str], str]) -> None:
        for name in REPLICAS:
            url = store("agent-store" if name == "r0" else "")
            options = ("--replica", name, "--url", self.replica_url(name), "--redis-url", url)
            self.agents[name] = self._program(f"agent-{name}", "agent", *options)

    def _name_gateways(self, store: Callable[[str], str], r0_port: int) -> None:
        urls = {name: self.replica_url(name) for name in REPLICAS} | self._light
        replicas = [{"id": name, "url": url} for name, url in urls.items()]
        replicas[0]["url"] = f"http://127.0.0.1:{r0_port}"
        for number, port in enumerate(self._gateway_ports):
            settings = self._settings | {
                "id": f"gw{number}",
                "host": "127.0.0.1",
                "port": port,
                "redis": {"url": store("gateway-store" if number == 0 else "")},
                "replicas": replicas,
                "security": {"expose_decisions": True},
            }
            file = self._folder / f"gw{number}.yaml"
            file.write_text(yaml.safe_dump(settings))
            self.gateways.append(self._program(f"gw{number}", "gateway", "--config", str(file)))

    async def close(self) -> None:
        for proxy in self.proxies.values():
            await proxy.close()
        await end_all([*self.gateways, *self.agents.values(), *self.replicas.values()])
        self._light_process.close()
        await self.redis.close()
        if self.sentinels is not None:
            await self.sentinels.close()


@asynccontextmanager
async def running_stage(
    folder: Path, gateways: int, layout: Layout, replicas: int, settings: Mapping[str, Any] = NO_MORE
) -> AsyncIterator[Stage]:
    """Yields when every gateway is ready and exact on every replica. Ends every process."""
    stage = Stage(folder, gateways, layout, replicas, settings)
    async with AsyncExitStack() as stack:
        stage.http = await stack.enter_async_context(client())
        stack.push_async_callback(stage.close)
        await stage.start()
        yield stage
        await asyncio.to_thread(STREAMS.read, stage.urls)
