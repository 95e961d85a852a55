"""Which members of a cluster answer, and how a detached cluster is stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import httpx

from gateway.ops.local.embedded_redis import problem_with, without_password
from gateway.ops.local.probes import ProbeAnswer, ask_any_server, ask_gateway, ask_replica, client
from gateway.ops.local.processes import Process, Stopped, stop
from gateway.ops.local.state_dir import Cluster, ClusterProcess, agent_id, forget_cluster, read_cluster, read_processes

State = Literal["ready", "not ready", "dead"]
_ASLEEP = "asleep: it gets no requests until its engine is awake (POST /wake_up or /resume)"
_DRAINED = "drained: it gets no new requests until kvgate undrain, or until its engine restarts"


@dataclass(frozen=True)
class MemberStatus:
    """One line of `kvgate status`."""

    kind: Literal["gateway", "agent", "replica", "redis"]
    id: str
    url: str
    """An agent serves nothing itself: its `url` is its replica's."""
    pid: int | None
    state: State
    detail: str
    """What is wrong; else a gateway's store, or the warnings about Redis of the gateway that watches it."""


async def cluster_status(state_dir: Path) -> list[MemberStatus]:
    """Asks every member of the cluster. Raises ClusterError if no cluster is up."""
    cluster = read_cluster(state_dir)
    processes = read_processes(state_dir)
    redis = next((process for process in processes if process.kind == "redis"), None)
    by_pid: dict[int | None, Process] = {process.pid: process for process in processes}
    async with client() as http:
        asked = asyncio.gather(*(ask_gateway(http, member.url) for member in cluster.gateways))
        others = asyncio.gather(
            problem_with(cluster.redis_url),
            asyncio.gather(*(_replica_status(http, member, by_pid.get(member.pid)) for member in cluster.replicas)),
        )
        answers, (redis_problem, statuses) = await asked, await others
    warnings = [warning for answer in answers for warning in answer.store_warnings]
    heard = frozenset().union(*(answer.exact for answer in answers))
    drained = frozenset().union(*(answer.draining for answer in answers))
    asleep = frozenset().union(*(answer.asleep for answer in answers))
    told = dict.fromkeys(drained, _DRAINED) | dict.fromkeys(asleep, _ASLEEP)
    statuses = [replace(one, detail=one.detail or told.get(one.id, "")) for one in statuses]
    agents = {process.id: process for process in processes if process.kind == "agent"}
    return [
        _redis_status(cluster, redis, redis_problem, warnings),
        *statuses,
        *(
            _agent_status(member, agents[name], member.id in heard, member.id in told)
            for member in cluster.replicas
            if (name := agent_id(member.id)) in agents
        ),
        *(
            _gateway_status(member, by_pid.get(member.pid), answer)
            for member, answer in zip(cluster.gateways, answers, strict=True)
        ),
    ]


def _redis_status(cluster: Cluster, process: Process | None, problem: str | None, warnings: list[str]) -> MemberStatus:
    pid = process.pid if process else None
    state, detail = _state(process, problem), problem or "; ".join(warnings)
    return MemberStatus("redis", "redis", without_password(cluster.redis_url), pid, state, detail)


async def _replica_status(http: httpx.AsyncClient, member: ClusterProcess, process: Process | None) -> MemberStatus:
    ask = ask_any_server if member.pid is None else ask_replica
    problem = (await ask(http, member.url)).problem
    return MemberStatus("replica", member.id, member.url, member.pid, _state(process, problem), problem or "")


def _agent_status(replica: ClusterProcess, process: Process, is_heard: bool, is_resting: bool) -> MemberStatus:
    problem = None if is_heard or is_resting else "no gateway hears it: Redis is away, or its replica is not ready"
    return MemberStatus("agent", process.id, replica.url, process.pid, _state(process, problem), problem or "")


def _gateway_status(member: ClusterProcess, process: Process | None, answer: ProbeAnswer) -> MemberStatus:
    detail = answer.problem or (f"store: {answer.store}" if answer.store else "")
    return MemberStatus("gateway", member.id, member.url, member.pid, _state(process, answer.problem), detail)


def _state(process: Process | None, problem: str | None) -> State:
    if process is not None and not process.is_alive():
        return "dead"
    return "ready" if problem is None else "not ready"


async def stop_cluster(state_dir: Path) -> Stopped:
    """Stop the running processes of the cluster in `state_dir`, and forget the cluster.

    Only processes that this cluster started are signalled. If none runs, nothing happens.
    """
    stopped = await stop(read_processes(state_dir))
    forget_cluster(state_dir)
    return stopped
