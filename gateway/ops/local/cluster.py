"""Starts a cluster and waits until it can serve.

The order is: Redis, the replicas, an agent for each replica that publishes KV events, the gateways. Each kind is ready
before the next one starts, so that every gateway finds a whole cluster at its first health check.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import httpx

from gateway.ops.errors import CommandError
from gateway.ops.followed import FollowedReplica, replica_certificate
from gateway.ops.local.cluster_status import config_problem
from gateway.ops.local.embedded_redis import find_redis_server, problem_with, without_password
from gateway.ops.local.plan import (
    HOST,
    Plan,
    agent_environment,
    base_config,
    gateway_config,
    not_used,
    wants_records_secret,
)
from gateway.ops.local.ports import describe_holder, free_ports, lock_port, lock_state_dir, require_free
from gateway.ops.local.probes import ask_gateway, client, has_events, problem_of, refusal
from gateway.ops.local.processes import Children, Kind, Process, Stopped, stop, tail, this_process
from gateway.ops.local.state_dir import (
    Cluster,
    ClusterProcess,
    agent_id,
    forget_cluster,
    records_secret,
    remove_old_files,
    write_cluster,
    write_private,
    write_processes,
)
from gateway.ops.local.waiting import WaitReport, nobody_there, why_not_ready
from gateway.settings.gateway_settings import GatewaySettings
from gateway.tls import contexts_of

_READY_TIMEOUT_S = 50.0  # `up --detach` may take 60 s, and stopping everything takes some of them
_POLL_S, _LOOK_S = 0.1, 1.0
_EVENTS_PATIENCE_S = 10.0
_REFUSED_PATIENCE_S = 5.0
_KVGATE = (sys.executable, "-P", "-m", "gateway.ops.cli")
# Each gateway's file has its id and its store. These variables would override them, with one value for all gateways.
_KEPT_FROM_CHILDREN = ("KVGATE_ID", "KVGATE_REDIS_URL", "KVGATE_REDIS_NAMESPACE", "KVGATE_API_KEY")

Probe = Callable[[], Awaitable[str | None]]
"""Asks a process why it cannot serve; None if it can."""


class LocalCluster:
    """One cluster of child processes. The caller of `start` also calls `stop`, unless the cluster stays (--detach)."""

    def __init__(self, plan: Plan, env: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._env = {name: value for name, value in env.items() if name not in _KEPT_FROM_CHILDREN}
        self._base = base_config(plan, self._env)
        self._locks: list[int] = []
        self._children = Children(self._env, die_with_parent=not plan.detach)
        self._not_ready: dict[str, str] = {}
        self._exact: set[str] = set()

    async def start(self) -> Cluster:
        """Start everything, wait until it can serve and write cluster.json; CommandError says why it cannot."""
        plan = self._plan
        self._claim()
        redis_port, *ports = free_ports(1 + plan.gateways + plan.simulated, excluded=plan.port)
        gateway_ports, replica_ports = ports[: plan.gateways], ports[plan.gateways :]
        simulated = [FollowedReplica(id=f"r{n}", url=f"http://{HOST}:{port}") for n, port in enumerate(replica_ports)]
        replicas = list(plan.fronted) or simulated
        redis_url = plan.redis_url or f"redis://{HOST}:{redis_port}"
        if fields := not_used(plan, self._base):
            self._say(f"{plan.base_config}: not used: {', '.join(fields)}")
        settings = self._write_configs(gateway_ports, redis_url, replicas)
        shown = replica_certificate(settings)
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S), client(contexts_of(shown)()) as http:
                await self._find_fronted()
                await self._start_redis(redis_url, redis_port)
                pids = await self._start_replicas(http, simulated if not plan.fronted else [], replica_ports)
                await self._start_agents(http, replicas, agent_environment(settings))
                gateways = await self._start_gateways(http, gateway_ports)
        except TimeoutError:
            raise CommandError(self._why_not_ready()) from None
        cluster = Cluster(
            url=f"http://{HOST}:{plan.port}",
            redis_url=redis_url,
            gateways=gateways,
            replicas=[ClusterProcess(replica.id, replica.url, pids.get(replica.id)) for replica in replicas],
            redis_namespace=settings.redis.namespace,
            base_config=str(plan.base_config.absolute()) if plan.base_config else "",
        )
        write_cluster(plan.state_dir, cluster)
        return cluster

    async def news(self) -> AsyncIterator[str]:
        """Yields what the user should know from now on: a process that exits, and whether gateways use the file that
        they follow; never ends."""
        looked_s, told, file = 0.0, "", str(self._plan.base_config or "")
        async with client() as http:
            while True:
                for process, code in self._children.newly_exited():
                    yield f"{process.id} exited with code {code}; it is not restarted. Log: {process.log}"
                if file and time.monotonic() - looked_s >= _LOOK_S:
                    answer = await ask_gateway(http, f"http://{HOST}:{self._plan.port}")
                    problem = config_problem(file, answer.ready)
                    if answer.ready and problem != told:
                        yield problem or f"{file} is used again"
                        told = problem
                    looked_s = time.monotonic()
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> Stopped:
        """Stop every process within 5 s and forget the cluster."""
        stopped = await stop(self._children.processes)
        if self._locks:  # without them, the state directory belongs to another cluster
            forget_cluster(self._plan.state_dir)
        return stopped

    def _claim(self) -> None:
        state_dir = self._plan.state_dir
        try:
            for directory in ("logs", "redis"):
                (state_dir / directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"cannot write in state dir {state_dir}: {error.strerror}") from None
        locks = [lock_port(self._plan.port, state_dir), lock_state_dir(state_dir)]
        require_free(HOST, self._plan.port)
        self._locks = locks
        self._children.inherit(locks)
        remove_old_files(state_dir)

    def _write_configs(self, ports: list[int], redis_url: str, replicas: list[FollowedReplica]) -> GatewaySettings:
        """Write the file of each gateway. Returns the settings of one."""
        secret = records_secret(self._plan.state_dir) if wants_records_secret(self._base, self._env) else None
        for n, port in enumerate(ports):
            text, settings = gateway_config(
                self._plan, self._base, f"gw{n}", port, redis_url, replicas, self._env, secret
            )
            write_private(self._config_of(n), text)
        return settings

    def _config_of(self, n: int) -> Path:
        return self._plan.state_dir / f"gw{n}.yaml"

    async def _find_fronted(self) -> None:
        """Waits for one fronted server to accept connections; others may come later. CommandError if none does."""
        urls = [replica.url for replica in self._plan.fronted]
        began = time.monotonic()
        while urls:
            answers = await asyncio.gather(*(refusal(url) for url in urls))
            refusals = {url: cause for url, cause in zip(urls, answers, strict=True) if cause is not None}
            if len(refusals) < len(urls):
                return
            if time.monotonic() >= began + _REFUSED_PATIENCE_S:
                raise CommandError(nobody_there(refusals, _REFUSED_PATIENCE_S))
            await asyncio.sleep(_POLL_S)

    async def _start_redis(self, url: str, port: int) -> None:
        if self._plan.redis_url is not None:
            if problem := await problem_with(url):
                raise CommandError(f"the Redis at {without_password(url)} cannot be used: {problem}")
            return
        server = find_redis_server()
        self._say(f"{server} on {url}")
        self._start("redis", "redis", server.command(port, self._plan.state_dir / "redis"))
        await self._until_ready({"redis": partial(problem_with, url)})

    async def _start_replicas(
        self, http: httpx.AsyncClient, replicas: list[FollowedReplica], ports: list[int]
    ) -> dict[str, int]:
        """Starts the simulated replicas, and returns their pids by id."""
        speed = str(self._plan.speed)
        pids = {}
        for replica, port in zip(replicas, ports, strict=False):
            command = (*_KVGATE, "replica-sim", "--id", replica.id, "--host", HOST, "--port", str(port))
            pids[replica.id] = self._start("replica", replica.id, (*command, "--speed", speed)).pid
        await self._until_ready({replica.id: partial(problem_of, http, replica.url) for replica in replicas})
        return pids

    async def _start_agents(
        self, http: httpx.AsyncClient, replicas: list[FollowedReplica], environment: dict[str, str]
    ) -> None:
        """Starts an agent for each replica that publishes KV events; a gateway is ready when it hears all of them.

        A replica that does not answer yet gets an agent too, but no gateway waits for it.
        """
        found = await asyncio.gather(*(self._publishes_events(http, replica) for replica in replicas))
        for replica, publishes in zip(replicas, found, strict=True):
            if publishes is False:
                continue
            if publishes is None:
                self._say(f"replica {replica.id} does not answer yet: {replica.url}")
            command = [*_KVGATE, "agent", "--replica", replica.id, "--url", replica.url]
            for option in ("events", "replay", "lmcache", "dp_rank"):
                if (value := getattr(replica, option)) not in ("", None):
                    command += [f"--{option.replace('_', '-')}", str(value)]
            self._start("agent", agent_id(replica.id), command, environment)
            if publishes:
                self._exact.add(replica.id)

    async def _publishes_events(self, http: httpx.AsyncClient, replica: FollowedReplica) -> bool | None:
        """Whether the replica publishes KV events; None if it does not answer in time."""
        if replica.events:
            return True
        deadline = time.monotonic() + _EVENTS_PATIENCE_S
        while True:
            publishes = await has_events(http, replica.url)
            if publishes is not None or time.monotonic() >= deadline:
                return publishes
            await asyncio.sleep(_POLL_S)

    async def _start_gateways(self, http: httpx.AsyncClient, ports: list[int]) -> list[ClusterProcess]:
        gateways = []
        for n, port in enumerate(ports):
            name = f"gw{n}"
            base = self._plan.base_config
            files = [path for path in (base and base.absolute(), self._config_of(n)) if path is not None]
            command = (*_KVGATE, "gateway", *(part for path in files for part in ("--config", str(path))))
            gateways.append(ClusterProcess(name, f"http://{HOST}:{port}", self._start("gateway", name, command).pid))
        if self._plan.detach:  # this process exits: name those that stay
            for lock in self._locks:
                describe_holder(lock, (gateway.pid for gateway in gateways), self._plan.state_dir)
        probes: dict[str, Probe] = {
            gateway.id: partial(_problem_of_gateway, http, gateway.url, self._exact) for gateway in gateways
        }
        probes["the shared port"] = partial(_problem_of_gateway, http, f"http://{HOST}:{self._plan.port}", set())
        await self._until_ready(probes)
        return gateways

    def _start(
        self, kind: Kind, name: str, command: tuple[str, ...] | list[str], secrets: Mapping[str, str] | None = None
    ) -> Process:
        process = self._children.start(kind, name, command, self._plan.state_dir / "logs" / f"{name}.log", secrets)
        parent = [] if self._plan.detach else [this_process()]
        write_processes(self._plan.state_dir, [*parent, *self._children.processes])
        return process

    async def _until_ready(self, probes: dict[str, Probe]) -> None:
        """Probes until all can serve, and reports now and then. Raises CommandError if a process exits."""
        waiting = WaitReport([process.id for process in self._children.processes if process.id in probes], self._say)
        began = time.monotonic()
        while True:
            answers = await asyncio.gather(*(probe() for probe in probes.values()))
            self._not_ready = {name: problem for name, problem in zip(probes, answers, strict=True) if problem}
            for process, code in self._children.newly_exited():
                raise CommandError(f"{process.id} exited with code {code} while starting; {_log_of(process)}")
            if not self._not_ready:
                return
            waiting.tell(self._not_ready, time.monotonic() - began)
            await asyncio.sleep(_POLL_S)

    def _why_not_ready(self) -> str:
        why, is_not_ours = why_not_ready(self._not_ready, self._plan.fronted)
        late = next((process for process in self._children.processes if process.id in self._not_ready), None)
        log = f"; {_log_of(late)}" if late and not is_not_ours else ""
        return f"not ready after {_READY_TIMEOUT_S:.0f} s: {why}{log}"


def _log_of(process: Process) -> str:
    return f"the log of {process.id}, {process.log}, ends:\n{tail(process.log)}"


async def _problem_of_gateway(http: httpx.AsyncClient, url: str, exact: set[str]) -> str | None:
    """Why a gateway cannot serve, does not reach its store, or does not hear the agents of these replicas: here all of
    them are known to run. (A gateway by itself serves without them, too.)"""
    answer = await ask_gateway(http, url)
    if answer.problem is not None:
        return answer.problem
    if answer.ready["store"] == "fallback":
        return "has not reached Redis yet"
    for replica, said in answer.ready.get("taken_ids", {}).items():
        return f"{replica}: {said}"
    missing = sorted(exact.difference(answer.ready["exact"]))
    return f"does not hear the agents of {', '.join(missing)} yet" if missing else None
