"""Which members of a cluster answer, and how a detached cluster is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.ops.local.embedded_redis import problem_with, without_password
from gateway.ops.local.probes import ask_gateway, client, problem_of
from gateway.ops.local.processes import Stopped, stop
from gateway.ops.local.state_dir import agent_id, forget_cluster, read_cluster, read_processes

State = Literal["ready", "not ready", "dead"]
_ProcessKind = Literal["gateway", "agent", "replica", "redis"]
_ASLEEP = "asleep: it gets no requests until its engine is awake (POST /wake_up or /resume)"
_UNHEARD = "no gateway hears it: Redis is away, or its replica is not ready"
_DRAINED = "drained: it gets no new requests until kvgate undrain, or until its engine restarts"


@dataclass(frozen=True)
class MemberStatus:
    """One line of `kvgate status`."""

    kind: _ProcessKind
    id: str
    url: str
    """An agent serves nothing itself: its `url` is its replica's."""
    pid: int | None
    state: State
    detail: str
    """What is wrong; else a gateway's store, or the warnings about Redis of the gateway that watches it."""


async def cluster_status(state_dir: Path) -> list[MemberStatus]:
    """Asks every member of the cluster. Raises CommandError if no cluster is up."""
    cluster = read_cluster(state_dir)
    processes = {(process.kind, process.id): process for process in read_processes(state_dir)}
    async with client() as http:
        answers, problems, redis_problem = await asyncio.gather(
            asyncio.gather(*(ask_gateway(http, each.url) for each in cluster.gateways)),
            asyncio.gather(*(problem_of(http, one.url, is_simulated=one.pid is not None) for one in cluster.replicas)),
            problem_with(cluster.redis_url),
        )

    def told(name: str) -> list[str]:
        """What any gateway lists there."""
        return [each for answer in answers for each in answer.ready.get(name, ())]

    unready = {name: what for answer in answers for name, what in answer.ready.get("not_ready", {}).items()}
    resting = dict.fromkeys(told("draining"), _DRAINED) | dict.fromkeys(told("asleep"), _ASLEEP)

    def status(kind: _ProcessKind, name: str, url: str, problem: str | None, detail: str = "") -> MemberStatus:
        process = processes.get((kind, name))
        state: State = "ready" if problem is None else "not ready"
        if process is not None and not process.is_alive():
            state = "dead"
        return MemberStatus(kind, name, url, process.pid if process else None, state, problem or detail)

    redis_url = without_password(cluster.redis_url)
    members = [status("redis", "redis", redis_url, redis_problem, "; ".join(told("store_warnings")))]
    for replica, problem in zip(cluster.replicas, problems, strict=True):
        why = problem or (None if replica.id in resting else unready.get(replica.id))
        members.append(status("replica", replica.id, replica.url, why, resting.get(replica.id, "")))
    for replica in cluster.replicas:
        if ("agent", name := agent_id(replica.id)) in processes:
            # Of a replica that is not ready, nobody can say whether its agent is heard.
            is_good = replica.id in told("exact") or replica.id in resting or replica.id in unready
            members.append(status("agent", name, replica.url, None if is_good else _UNHEARD))
    for gateway, answer in zip(cluster.gateways, answers, strict=True):
        store = f"store: {answer.ready.get('store')}"
        problem = config_problem(cluster.base_config, answer.ready)
        members.append(
            status("gateway", gateway.id, gateway.url, answer.problem, "; ".join(filter(None, (store, problem))))
        )
    return members


def config_problem(file: str, ready: Mapping[str, Any]) -> str:
    """What a gateway's /ready says against the file that it follows; empty if the file is used."""
    where = ", ".join(map(str, ready.get("config_problems", ())))
    return f"{file} is wrong and not used ({where}): kvgate check-config says what is wrong" if where else ""


async def stop_cluster(state_dir: Path) -> Stopped:
    """Stop the running processes of the cluster in `state_dir`, and forget the cluster.

    Only processes that this cluster started are signalled. If none runs, nothing happens.
    """
    stopped = await stop(read_processes(state_dir))
    forget_cluster(state_dir)
    return stopped
