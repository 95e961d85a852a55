"""Real vLLM replicas on this machine, each with a small KV cache, and a cluster of gateways in front of them."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import running_gateways
from bench.vllm import install
from bench.vllm.server import Server
from gateway.ops.local.ports import free_ports

BLOCK_TOKENS = 32  # the smallest size that vLLM has on CPUs
CONTEXT_TOKENS = 4096


@dataclass
class VllmReplica(Server):
    """One `vllm serve`; `start` after `kill` brings it back on the same ports, as a new incarnation."""

    events_port: int
    replay_port: int
    blocks: int
    """Blocks of the KV cache, 32 tokens each. The engine uses one of them itself (its null block)."""
    size: str = install.TINY
    """The model's size: install.TINY or install.SMALL."""
    has_rust_frontend: bool = False
    """Whether the server in front of the engine is vLLM's in Rust."""
    more: tuple[str, ...] = ()
    """Further options of `vllm serve`."""

    def environment(self) -> dict[str, str]:
        return super().environment() | ({"VLLM_USE_RUST_FRONTEND": "1"} if self.has_rust_frontend else {})

    async def restart(self) -> None:
        """Kills it, starts it again on its ports and waits until it serves. The event loop continues meanwhile."""
        await asyncio.to_thread(self.kill)
        self.start()
        await asyncio.to_thread(self.wait_until_healthy)

    def command(self) -> list[str]:
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
            "dtype": "float32",  # rounding must not make answers depend on the cached part of a prompt
            "max-model-len": CONTEXT_TOKENS,
            "max-num-seqs": 8,
            "max-num-batched-tokens": 1024,  # so that longer prompts are computed, and reported, in several chunks
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": self.blocks,
            "distributed-executor-backend": "uni",  # the worker runs in the engine's process, which starts faster
            "kv-events-config": json.dumps(events),
        }
        flags = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "enable-request-id-headers")
        return [
            *(str(install.environment() / "bin" / "vllm"), "serve", str(install.model(self.size))),
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
            *(f"--{name}" for name in flags),
            *self.more,
        ]


@contextmanager
def running_replicas(
    folder: Path, count: int = 2, blocks: int = 256, size: str = install.TINY, has_rust_frontend: bool = False
) -> Iterator[list[VllmReplica]]:
    """`count` replicas r0, r1, … that serve. They start at the same time and are killed at the end. Logs are in
    `folder`."""
    ports = iter(free_ports(3 * count))
    replicas = [
        VllmReplica(
            f"r{n}", next(ports), folder / f"r{n}.log", next(ports), next(ports), blocks, size, has_rust_frontend
        )
        for n in range(count)
    ]
    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.kill)
        print(f"\n{count} vLLM replicas serve after {start_together(replicas):.0f} s", flush=True)
        yield replicas


def start_together(replicas: Sequence[Server]) -> float:
    """Starts them all and waits until each is healthy. Returns the seconds that this took."""
    started = time.monotonic()
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.wait_until_healthy()
    return time.monotonic() - started


@dataclass(frozen=True)
class VllmCluster:
    """Gateways in front of real replicas, with the processes that `kvgate up` starts beside them."""

    replicas: list[VllmReplica]
    gateway_urls: list[str]
    redis_url: str
    state_dir: Path

    def replica(self, name: str) -> VllmReplica:
        return next(replica for replica in self.replicas if replica.id == name)


@contextmanager
def running_cluster(
    replicas: int = 2,
    gateways: int = 2,
    blocks: int = 256,
    config: dict[str, Any] | None = None,
    has_rust_frontend: bool = False,
) -> Iterator[VllmCluster]:
    """Starts Redis, gateways and an agent for each replica with `kvgate up`. All of it is stopped at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-vllm-") as folder,
        running_replicas(Path(folder), replicas, blocks, has_rust_frontend=has_rust_frontend) as started,
        running_gateways({each.id: each.url for each in started}, gateways=gateways, config=config) as cluster,
    ):
        yield VllmCluster(started, cluster.gateway_urls, cluster.redis_url, cluster.state_dir)
