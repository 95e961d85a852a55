"""A cluster for experiments and tests: simulated replicas of any size behind `kvgate up`, all as real processes.

The replicas are started here, so that each can have its own size and can be killed and started again on its port.
`kvgate up --detach` starts Redis, the gateways and the agents.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.streams import STREAMS
from gateway.ops.local.ports import free_ports
from gateway.ops.local.processes import Kind, Process
from gateway.ops.local.state_dir import read_processes

KVGATE = (sys.executable, "-P", "-m", "gateway.ops.cli")
_REPLICA_SIM = (*KVGATE, "replica-sim")
_READY_S = 20.0
_POLL_S = 0.05
_GONE_S = 10.0


@dataclass
class SimReplica:
    """A simulated replica's process; `start` after `stop` or `kill` brings it back on the same port."""

    id: str
    port: int
    arguments: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    command: tuple[str, ...] = _REPLICA_SIM

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = (*self.command, "--id", self.id, "--port", str(self.port), *self.arguments)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_until_ready(self) -> None:
        """Waits until it answers. `kvgate up` asks each replica only once whether it publishes events."""
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                httpx.get(f"{self.url}/health").raise_for_status()
            except httpx.HTTPError:
                if time.monotonic() > deadline:
                    raise
                select.select([], [], [], _POLL_S)
            else:
                return

    def fail(self, mode: str, **details: Any) -> None:
        """Makes it fail on demand. `fail("none")` ends the failure. See gateway/simulator/faults.py."""
        httpx.post(f"{self.url}/sim/fail", json={"mode": mode, **details}).raise_for_status()

    def state(self) -> dict[str, Any]:
        """The replica's own report: running, waiting, aborted, cached_tokens, recent requests."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/sim/state").raise_for_status().json()
        return answer


class Daemon:
    """A gateway or an agent that `kvgate up` started. `start` after `kill` or `stop` runs the same command again."""

    def __init__(self, process: Process) -> None:
        self.id = process.id
        self.log = process.log
        command, self._environment = command_of(process.pid)
        self.command = tuple(command)
        self._first = process
        self._later: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._first.pid if self._later is None else self._later.pid

    def is_alive(self) -> bool:
        return self._first.is_alive() if self._later is None else self._later.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL and waits until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Sends SIGTERM and waits until it is gone."""
        self._end(signal.SIGTERM)

    def start(self, *command: str) -> None:
        """Runs it again, or runs `command` instead."""
        with self.log.open("ab") as output:
            self._later = subprocess.Popen(
                command or self.command, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def _end(self, number: int) -> None:
        if not self.is_alive():
            return
        gone = os.pidfd_open(self.pid)  # it may not be a child of this process
        try:
            os.kill(self.pid, number)
            if not select.select([gone], [], [], _GONE_S)[0]:
                raise TimeoutError(f"{self.id} did not stop")
        finally:
            os.close(gone)
        if self._later is not None:
            self._later.wait()


def command_of(pid: int) -> tuple[list[str], dict[str, str]]:
    """The command line of a process, and the environment that it was started with."""
    command, environ = (Path(f"/proc/{pid}/{name}").read_text().split("\0")[:-1] for name in ("cmdline", "environ"))
    return command, dict(pair.split("=", 1) for pair in environ)


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    url: str
    redis_url: str
    state_dir: Path
    gateways: list[dict[str, Any]]
    replicas: list[SimReplica]
    pool: str = field(default="kvgate-sim-vlm-63845a77")
    """The pool of the simulator's default model."""
    gateway_processes: list[Daemon] = field(default_factory=list)
    agents: list[Daemon] = field(default_factory=list)
    """`agent-r0` and so on. A replica that publishes no events has none."""

    @property
    def gateway_urls(self) -> list[str]:
        return [gateway["url"] for gateway in self.gateways]

    def signal_gateway(self, index: int, number: signal.Signals) -> None:
        self.gateway_processes[index].signal(number)

    def agent(self, replica: str) -> Daemon:
        """The agent of a replica."""
        return next(agent for agent in self.agents if agent.id == f"agent-{replica}")


@contextmanager
def running_cluster(
    *,
    gateways: int = 2,
    replicas: int = 3,
    replica_arguments: Sequence[str] = ("--speed", "20"),
    replica_command: Sequence[str] = _REPLICA_SIM,
    events: bool = True,
    config: dict[str, Any] | None = None,
    redis_url: str | None = None,
) -> Iterator[Cluster]:
    """Starts a cluster, waits until every gateway is ready, and stops all of it at the end.

    Without `events` the replicas publish none and have no agents. If `replica_command` is given, it runs instead of
    `kvgate replica-sim`, with the same options.
    """
    arguments = (*replica_arguments, *([] if events else ["--no-events"]))
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
        state_dir = Path(folder)
        with running_replicas(state_dir, replicas, arguments, tuple(replica_command)) as sims:
            urls = {sim.id: sim.url for sim in sims}
            with _gateways(state_dir, urls, sims, gateways, config, None, redis_url) as cluster:
                yield cluster


def told_roles(replicas: Sequence[SimReplica], prefills: int) -> dict[str, str]:
    """What gateways are told `beside` these replicas if so many only compute prompts, and the others decode. Nothing if
    none does: then all do everything."""
    roles = ["prefill"] * prefills + ["decode"] * (len(replicas) - prefills)
    return {sim.id: f"role={role}" for sim, role in zip(replicas, roles, strict=True)} if prefills else {}


@contextmanager
def running_replicas(
    folder: Path, count: int, arguments: tuple[str, ...], command: tuple[str, ...] = _REPLICA_SIM
) -> Iterator[list[SimReplica]]:
    """Simulated replicas r0, r1, … that serve without a gateway. Logs are in `folder`."""
    sims = [
        SimReplica(f"r{i}", port, arguments, folder / f"r{i}.log", command=command)
        for i, port in enumerate(free_ports(count))
    ]
    try:
        for sim in sims:
            sim.start()
        for sim in sims:
            sim.wait_until_ready()
        yield sims
    finally:
        for sim in sims:
            sim.kill()


@contextmanager
def running_gateways(
    urls: Mapping[str, str],
    *,
    gateways: int = 2,
    config: dict[str, Any] | None = None,
    policy: str | None = None,
    redis_url: str | None = None,
    beside: Mapping[str, str] | None = None,
    kvgate: Sequence[str] = KVGATE,
) -> Iterator[Cluster]:
    """Starts gateways in front of servers that already run, and agents if there are events. `urls` are those of the
    servers, by replica id. `beside` is what else `kvgate up --replica` is told of them, like `lmcache=http://…`.
    `kvgate` may be the command of another checkout; then that checkout's gateways run."""
    told = {replica: f",{text}" for replica, text in (beside or {}).items() if text}
    urls = {replica: url + told.get(replica, "") for replica, url in urls.items()}
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
        _gateways(Path(folder), urls, [], gateways, config, policy, redis_url, kvgate) as cluster,
    ):
        yield cluster


@contextmanager
def _gateways(
    state_dir: Path,
    urls: Mapping[str, str],
    sims: list[SimReplica],
    gateways: int,
    config: dict[str, Any] | None,
    policy: str | None,
    redis_url: str | None,
    kvgate: Sequence[str] = KVGATE,
) -> Iterator[Cluster]:
    daemons: list[Daemon] = []
    try:
        _up(kvgate, state_dir, gateways, urls, config, policy, redis_url)
        described = json.loads((state_dir / "cluster.json").read_text())
        cluster = Cluster(
            described["url"],
            described["redis_url"],
            state_dir,
            described["gateways"],
            sims,
            gateway_processes=_daemons(state_dir, "gateway"),
            agents=_daemons(state_dir, "agent"),
        )
        daemons = [*cluster.gateway_processes, *cluster.agents]
        yield cluster
        STREAMS.read(cluster.gateway_urls)
    finally:
        processes: list[Daemon | SimReplica] = [*daemons, *sims]
        for each in processes:
            each.signal(signal.SIGCONT)
        subprocess.run([*KVGATE, "down", "--state-dir", str(state_dir)], capture_output=True, check=False)
        for daemon in daemons:
            daemon.kill()


def _daemons(state_dir: Path, kind: Kind) -> list[Daemon]:
    return [Daemon(process) for process in read_processes(state_dir) if process.kind == kind]


def _up(
    kvgate: Sequence[str],
    state_dir: Path,
    gateways: int,
    urls: Mapping[str, str],
    config: dict[str, Any] | None,
    policy: str | None,
    redis_url: str | None,
) -> None:
    options = ["--detach", "--state-dir", str(state_dir), "--gateways", str(gateways), "--port", str(free_ports(1)[0])]
    for replica, url in urls.items():
        options += ["--replica", f"id={replica},url={url}"]
    if config is not None:
        base = state_dir / "base.yaml"
        base.write_text(yaml.safe_dump(config))
        options += ["--config", str(base)]
    options += ["--policy", policy] if policy else []
    options += ["--redis-url", redis_url] if redis_url else []
    done = subprocess.run([*kvgate, "up", *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kvgate up failed:\n{done.stdout}\n{done.stderr}")
