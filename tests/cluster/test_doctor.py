"""`kvgate doctor` on real clusters: it finds nothing on a healthy one, and then everything that a test breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica, running_cluster, running_gateways
from gateway.doctor.event_endpoints import outward_address
from gateway.ops.local.ports import free_ports
from tests.cluster.clients import ask, prose
from tests.polling import eventually

pytestmark = pytest.mark.slow

_DOCTOR = (sys.executable, "-P", "-m", "gateway.ops.cli", "doctor", "--json")
CHUNKS = [f"kvchunk@org/model@01000100@0@{n:064x}" for n in range(100)]
"""Enough chunks that random samples of all keys do not miss them."""
_BUSY_MOMENTS = 5
UNWATCHED = {"store": {"watch": False}}
"""A gateway that watches the store would give chunks a TTL, and report its findings for a minute."""


@dataclass
class Said:
    """The doctor's report."""

    exit_code: int
    findings: list[dict[str, str]]
    unchecked: list[dict[str, str]]

    def found(self) -> set[tuple[str, str]]:
        return {(finding["code"], finding["subject"]) for finding in self.findings}


def doctor(*options: str, **env: str) -> Said:
    """The doctor's report. Runs it again if this machine was so busy that Redis answered late: the doctor finds that
    too."""
    for _ in range(_BUSY_MOMENTS):
        said = _doctor(*options, **env)
        if "redis-slow" not in {finding["code"] for finding in said.findings}:
            break
    return said


def _doctor(*options: str, **env: str) -> Said:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    done = subprocess.run([*_DOCTOR, *options], env=kept | env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    return Said(done.returncode, said["findings"], said["unchecked"])


@pytest.fixture(scope="module")
def healthy() -> Iterator[Cluster]:
    """Two gateways, three replicas with agents. A test that breaks something repairs it."""
    with running_cluster(gateways=2, replicas=3, replica_arguments=("--speed", "5"), config=UNWATCHED) as cluster:
        yield cluster


@pytest.fixture
async def store(healthy: Cluster) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(healthy.redis_url, decode_responses=True, protocol=2) as client:
        yield client


def of(cluster: Cluster) -> tuple[str, ...]:
    return ("--state-dir", str(cluster.state_dir), "--timeout", "5")


async def all_exact(cluster: Cluster) -> bool:
    async with httpx.AsyncClient() as http:
        ready = [(await http.get(f"{url}/ready")).json() for url in cluster.gateway_urls]
    return all(len(body["exact"]) == len(cluster.replicas) for body in ready)


async def test_a_healthy_cluster_that_serves_has_nothing_wrong_and_nothing_unchecked(healthy: Cluster) -> None:
    async with httpx.AsyncClient() as http:
        for n in range(12):
            await ask(http, healthy.gateway_urls[n % 2], prose(n))
    said = doctor(*of(healthy))
    assert (said.findings, said.unchecked, said.exit_code) == ([], [], 0)


async def test_an_agent_that_was_killed_is_found_until_it_is_back(healthy: Cluster) -> None:
    await eventually(lambda: all_exact(healthy))
    agent = healthy.agent("r0")
    agent.kill()
    try:

        async def is_found() -> bool:
            return ("agent-gone", "replica r0") in doctor(*of(healthy)).found()

        await eventually(is_found)
    finally:
        agent.start()
    await eventually(lambda: all_exact(healthy))
    assert doctor(*of(healthy)).findings == []


ODD = {
    "plain": (),
    "old": ("--vllm-version", "0.29.0"),
    "hashes": ("--block-size", "32", "--num-gpu-blocks", "4096"),
    "silent": ("--no-events",),
    "open": ("--host", "0.0.0.0"),
    "moved": ("--model", "/models/sim"),
    "deaf": (),
}


@contextmanager
def odd_cluster(folder: Path) -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    """Replicas with one problem each."""
    sims = {
        name: SimReplica(name, port, ("--speed", "0", *arguments), folder / f"{name}.log")
        for (name, arguments), port in zip(ODD.items(), free_ports(len(ODD)), strict=True)
    }
    with ExitStack() as stack:
        for sim in sims.values():
            stack.callback(sim.kill)
            sim.start()
            sim.wait_until_ready()  # one by one: a busy machine is too slow to start seven at once
        urls = {name: sim.url for name, sim in sims.items()}
        urls["deaf"] += f",events=tcp://127.0.0.1:{free_ports(1)[0]}"  # no engine publishes there
        yield stack.enter_context(running_gateways(urls, gateways=1)), sims


async def test_each_replica_is_found_with_what_is_wrong_with_it(tmp_path: Path) -> None:
    with odd_cluster(tmp_path) as (cluster, sims):
        async with httpx.AsyncClient() as http, redis.Redis.from_url(cluster.redis_url, protocol=2) as store:
            await store.mset(dict.fromkeys(CHUNKS, "kv"))  # the watcher gives them a TTL and reports it
            for n in range(4):
                (await ask(http, sims["deaf"].url, prose(n))).raise_for_status()

            async def found() -> set[tuple[str, str]] | None:
                said = doctor(*of(cluster)).found()
                is_told = {("events-missing", "replica deaf"), ("watch-warns", "Redis")} <= said
                return said if is_told else None  # agents and the watcher take samples only now and then

            said = await eventually(found)
    wanted = {
        ("watch-warns", "Redis"),
        ("redis-without-limit", "Redis"),
        ("redis-policy", "Redis"),
        ("vllm-names-no-sessions", "replica old"),
        ("vllm-versions-differ", f"pool {cluster.pool}"),
        ("hash-settings-differ", f"pool {cluster.pool}"),
        ("events-off", "replica silent"),
        ("name-in-several-pools", "model sim"),
        ("events-missing", "replica deaf"),
        *([("events-exposed", "replica open")] if outward_address() else []),
    }
    assert said == wanted
