"""Real vLLM replicas on this machine, each with a small KV cache, and a cluster of gateways in front of them.

A replica is two processes, the API server and its engine. They are killed together: the engine alone would outlive its
server and keep the ports.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.cluster import running_gateways
from bench.vllm import install
from gateway.local.ports import free_ports
from gateway.local.processes import tail

BLOCK_TOKENS = 32  # the smallest that vLLM has on CPUs
CONTEXT_TOKENS = 4096
_START_TIMEOUT_S = 180.0
_POLL_S = 0.1
_DIES_WITHIN_S = 20.0
# An engine computes on a GPU, and leaves its host's processors to agents and gateways.
_GIVING_WAY = ("nice", "-n", "10")


@dataclass
class VllmReplica:
    """One `vllm serve`; `start` after `kill` brings it back on the same ports, as a new incarnation."""

    id: str
    port: int
    events_port: int
    replay_port: int
    log: Path
    blocks: int
    """Of the KV cache, 32 tokens each. One of them is the engine's own (its null block)."""
    size: str = install.TINY
    """Of the model: one of install.SIZES."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; `wait_until_healthy` says when it serves. It dies with the thread that this is called from."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*_die_with_this_process(), *_GIVING_WAY, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(self.log.parent),
                start_new_session=True,  # a process group of its own: `kill` takes the engine with it
            )

    def wait_until_healthy(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Return once it serves. RuntimeError, with the end of its log, if it exits or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            if self._has_exited_within(_POLL_S) or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM replica {self.id} does not serve; its log ends with\n{tail(self.log, 30)}")

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """SIGKILL to the API server and the engine; returns when both are gone."""
        if self.process is None:
            return
        group = self.process.pid
        deadline = time.monotonic() + _DIES_WITHIN_S
        while _has_members(group):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._has_exited_within(_POLL_S)  # which reaps it
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM replica {self.id} outlives SIGKILL: process group {group}")
        self.process.wait()
        self.process = None

    async def restart(self) -> None:
        """Kill it, start it anew on its ports and wait until it serves, while the event loop goes on."""
        await asyncio.to_thread(self.kill)
        self.start()
        await asyncio.to_thread(self.wait_until_healthy)

    def _has_exited_within(self, timeout_s: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _command(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": f"kv@{self.id}@{install.MODEL}",
        }
        options: dict[str, Any] = {
            "served-model-name": install.MODEL,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",  # answers must not depend on which part of a prompt was cached, not even by rounding
            "max-model-len": CONTEXT_TOKENS,
            "max-num-seqs": 8,
            "max-num-batched-tokens": 1024,  # so that longer prompts are computed, and reported, in several chunks
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": self.blocks,
            "distributed-executor-backend": "uni",  # the worker lives in the engine's process: a quicker start
            "kv-events-config": json.dumps(events),
        }
        flags = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "enable-request-id-headers")
        return [
            *(str(install.environment() / "bin" / "vllm"), "serve", str(install.model(self.size))),
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
            *(f"--{name}" for name in flags),
        ]


def _environment(folder: Path) -> dict[str, str]:
    """This process' environment, less what would configure vLLM or Python in some other way."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(install.home() / "cache"),
        "VLLM_CONFIG_ROOT": str(install.home() / "config"),
        "VLLM_RPC_BASE_PATH": str(folder),  # its sockets go where they are removed afterwards
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, more than `blocks` need
        # One thread per replica, on whichever core is free: two replicas and the gateways share two.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONHASHSEED": "0",  # all replicas hash equal blocks to equal hashes
    }


@functools.cache
def _die_with_this_process() -> tuple[str, ...]:
    """What to put in front of a command so that it and all that it starts die with this process, however that ends.

    `bound` kills its command; being the first process in a PID namespace extends that to the command's children. Where
    the kernel refuses namespaces (in most containers), the engine of a test run that was killed by SIGKILL stays.
    """
    bound = (sys.executable, "-P", "-m", "gateway.local.bound", str(os.getpid()))
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if shutil.which(namespace[0]) is None:
        return bound
    permitted = subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0
    return (*bound, *namespace) if permitted else bound


def _has_members(group: int) -> bool:
    """Whether a process of this group still runs; one that nobody has reaped yet does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group_of_it, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group_of_it) == group and state not in "ZX":
            return True
    return False


@contextmanager
def running_replicas(
    folder: Path, count: int = 2, blocks: int = 256, size: str = install.TINY
) -> Iterator[list[VllmReplica]]:
    """`count` replicas r0, r1, … that serve; started at the same time, killed at the end. Logs are in `folder`."""
    ports = iter(free_ports(3 * count))
    replicas = [
        VllmReplica(f"r{n}", next(ports), next(ports), next(ports), folder / f"r{n}.log", blocks, size)
        for n in range(count)
    ]
    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.kill)
        print(f"\n{count} vLLM replicas serve after {start_together(replicas):.0f} s", flush=True)
        yield replicas


def start_together(replicas: Sequence[VllmReplica]) -> float:
    """Start them all and wait until each is healthy; the seconds that took."""
    started = time.monotonic()
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.wait_until_healthy()
    return time.monotonic() - started


@dataclass(frozen=True)
class VllmCluster:
    """Gateways, with what `kvgate up` starts beside them, in front of real replicas."""

    replicas: list[VllmReplica]
    gateway_urls: list[str]
    redis_url: str
    state_dir: Path

    def replica(self, name: str) -> VllmReplica:
        return next(replica for replica in self.replicas if replica.id == name)


@contextmanager
def running_cluster(
    replicas: int = 2, gateways: int = 2, blocks: int = 256, config: dict[str, Any] | None = None
) -> Iterator[VllmCluster]:
    """Redis, `gateways` gateways and an agent per replica, by `kvgate up`; all of it is stopped at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-vllm-") as folder,
        running_replicas(Path(folder), replicas, blocks) as started,
        running_gateways({each.id: each.url for each in started}, gateways=gateways, config=config) as cluster,
    ):
        yield VllmCluster(started, cluster.gateway_urls, cluster.redis_url, cluster.state_dir)
