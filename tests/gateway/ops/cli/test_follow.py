"""`kvgate agent`: its help, its refusals, its work and its end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from bench.cluster import SimReplica
from coordinator.keys import PoolKeys, pool_slug
from gateway.ops.local.ports import free_ports
from gateway.replicas.discovery.source import replica_at
from tests.gateway.ops.cli.conftest import COMMAND, Kvgate
from tests.gateway.ops.cli.test_commands import one_line_error
from tests.polling import wait_until
from tests.redis_server import running_redis

KEYS = PoolKeys(pool_slug("kvgate/sim-vlm"))
AGENT = ("agent", "--replica", "r0", "--url", "http://127.0.0.1:9")


# -- help and refusals -------------------------------------------------------------------------------------------------


def test_the_agents_help_says_what_the_engine_needs(kvgate: Kvgate) -> None:
    text = kvgate.call("agent", "--help").stdout
    for taught in ("--kv-events-config", "replay_endpoint", "KVGATE_REPLICA_API_KEY", "KVGATE_REDIS_URL", "degraded"):
        assert taught in text


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ((*AGENT, "--redis-url", "localhost:6379"), "--redis-url: must start with redis://"),
        (("agent", "--replica", "R 0", "--url", "http://h:1"), "--replica: is 'R 0'; must be 1 to 48 of"),
        (("agent", "--replica", "r0", "--url", "h:8000"), "--url: 'h:8000' is not a server's base URL"),
        (("agent", "--replica", "r0", "--url", "http://h:1/v1"), "--url: leave /v1 out"),
        (
            (*AGENT, "--events", "http://h:1"),
            "--events: is 'http://h:1'; must be tcp://host:port, or ipc:///path of a socket",
        ),
        (
            (*AGENT, "--events", "tcp://h:1", "--replay", "tcp://h"),
            "--replay: is 'tcp://h'; must be tcp://host:port, or",
        ),
        (
            (*AGENT, "--events", "ipc://h"),
            "--events: is 'ipc://h'; must be tcp://host:port, or ipc:///path of a socket",
        ),
        ((*AGENT, "--replay", "tcp://h:1"), "--replay: needs events"),
        ((*AGENT, "--redis-namespace", "{m}"), "--redis-namespace: is '{m}'; must be at most 48 of a-z"),
    ],
)
def test_a_bad_argument_gives_one_line_that_names_it(kvgate: Kvgate, arguments: tuple[str, ...], wrong: str) -> None:
    assert one_line_error(kvgate.call(*arguments)).startswith(f"kvgate: {wrong}")


def test_a_redis_password_is_not_quoted_back(kvgate: Kvgate) -> None:
    error = one_line_error(kvgate.call(*AGENT, "--redis-url", "redis://:a-secret@h:6379?socket_timout=1"))
    assert "--redis-url: " in error
    assert "a-secret" not in error


# -- work --------------------------------------------------------------------------------------------------------------


@dataclass
class Follower:
    """A test's own processes around one Redis. All that still run are killed at the end."""

    folder: Path
    redis_url: str
    store: redis.Redis
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            process = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=subprocess.STDOUT)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def agent(self, sim: SimReplica) -> subprocess.Popen[bytes]:
        return self.start("agent", "--replica", sim.id, "--url", sim.url, "--redis-url", self.redis_url)

    def replica(self) -> SimReplica:
        sim = SimReplica("r0", free_ports(1)[0], ("--speed", "0"), self.folder / "r0.log")
        sim.start()
        self.stack.callback(sim.kill)
        return sim

    def agent_holds_until_ms(self) -> int:
        return int(str(self.store.hget(KEYS.agents, "r0")).split(" ")[2])

    def agent_lease_ms(self) -> int | None:
        """The rest of the agent's lease on the replica in ms (0: it released the lease); None if the replica has no
        agent."""
        record: Any = self.store.hget(KEYS.agents, "r0")
        now: Any = self.store.time()
        return max(0, int(record.split(" ")[2]) - now[0] * 1000 - now[1] // 1000) if record else None


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Follower]:
    with running_redis() as server, redis.Redis.from_url(server.url, decode_responses=True) as store:
        follower = Follower(tmp_path, server.url, store)
        with follower.stack:
            yield follower


def get(url: str) -> httpx.Response | None:
    """The answer, if it is successful."""
    try:
        answer = httpx.get(url, trust_env=False, verify=False, timeout=5)
    except httpx.TransportError:
        return None
    return answer if answer.is_success else None


def ends_cleanly(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process ends with status 0 after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return process.wait(60) == 0


def test_an_agent_holds_its_replica_and_lets_it_go_when_told_to_stop(running: Follower) -> None:
    agent = running.agent(running.replica())
    wait_until(running.agent_lease_ms)
    held_until_ms = running.agent_holds_until_ms()
    assert ends_cleanly(agent)
    assert running.agent_holds_until_ms() < held_until_ms  # the agent released its lease; renewals only move it later
    assert running.agent_lease_ms() == 0
    assert "Traceback" not in (running.folder / "agent.log").read_text()


def test_an_agent_of_a_pod_with_a_long_name_holds_the_replica_that_gateways_find_there(running: Follower) -> None:
    sim, pod = running.replica(), "vllm-deepseek-r1-distill-llama-70b-instruct-7d9f8b6c5d-x2x4z"
    found = replica_at("http", "127.0.0.1", sim.port, {}, pod)
    agent = running.start("agent", "--replica", pod, "--url", sim.url, "--redis-url", running.redis_url)
    wait_until(lambda: running.store.hkeys(KEYS.agents) == [found.id])
    assert ends_cleanly(agent)


def test_the_next_agent_takes_over_at_once(running: Follower) -> None:
    sim = running.replica()
    first = running.agent(sim)
    wait_until(running.agent_lease_ms)
    name = str(running.store.hget(KEYS.agents, "r0")).split(" ")[0]
    second = running.agent(sim)
    assert ends_cleanly(first)
    wait_until(lambda: str(running.store.hget(KEYS.agents, "r0")).split(" ")[0] != name)
    assert ends_cleanly(second)


def test_an_agent_waits_for_its_engine_and_ends_while_it_does(running: Follower) -> None:
    sim = running.replica()
    sim.kill()
    agent = running.agent(sim)
    log = running.folder / "agent.log"
    wait_until(lambda: log.exists() and "waiting for the engine" in log.read_text())
    assert running.agent_lease_ms() is None
    sim.start()
    wait_until(running.agent_lease_ms)
    sim.kill()
    assert ends_cleanly(agent)


def test_an_agent_without_redis_waits_for_it_and_ends_while_it_does(running: Follower) -> None:
    sim, port = running.replica(), free_ports(1)[0]
    agent = running.start("agent", "--replica", "r0", "--url", sim.url, "--redis-url", f"redis://127.0.0.1:{port}")
    log = running.folder / "agent.log"
    wait_until(lambda: log.exists() and "store away" in log.read_text())
    assert ends_cleanly(agent)
