"""One replica with a tier for its KV: simulated, in scaled time, or real vLLM with real LMCache and Redis."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.cluster import running_replicas
from bench.embedded import connect, embedded_redis, info
from bench.load import BLOCK_TOKENS, MODEL
from bench.offload.scenarios import REAL, SIMULATED, Sizes
from bench.routing.fleets import DECODE_S_PER_TOKEN, PREFILL_TOKENS_PER_S
from bench.vllm import install, lmcache
from bench.vllm.printed import PrintedReplica, replica_file, running
from bench.vllm.replicas import BLOCK_TOKENS as BLOCK_TOKENS_ON_CPUS
from coordinator.redis.wire import Wire
from gateway.simulator.settings import SimLmcacheSettings

GPU, CPU, REDIS = "gpu", "cpu", "redis"
BLOCKS = 2560
"""The published limit: six prompts about images, or nine of the conversations."""
REAL_BLOCKS = 320
"""Blocks of 32 tokens: about six of the small model's prompts."""
CPU_GB = 30.0
REAL_CPU_GB = 4
_BUFFER_GB = 1
_SHOWN = {GPU: "GPU only", CPU: "CPU memory", REDIS: "Redis, direct"}


@dataclass(frozen=True)
class Tier:
    """A tier for KV that does not fit on the GPU, in chunks of this many tokens."""

    name: str
    chunk_tokens: int | None = None

    @property
    def label(self) -> str:
        return _SHOWN[self.name] + (f", {self.chunk_tokens}" if self.chunk_tokens else "")


def tiers(names: list[str], chunks: list[int]) -> list[Tier]:
    """Each named tier. A tier with chunks appears once for each chunk size."""
    return [Tier(name, size) for name in names for size in ([None] if name == GPU else chunks)]


@dataclass(frozen=True)
class Tallies:
    """KV outside the GPU."""

    cpu_bytes: int = 0
    """In CPU memory."""
    redis_bytes: int = 0
    """In Redis."""
    fetched_bytes: int = 0
    """Read from Redis so far."""


@dataclass(frozen=True)
class Stage:
    """A replica that serves, with empty caches."""

    engine: str
    url: str
    model: str
    block_tokens: int
    sizes: Sizes
    speed: float
    """Divides the engine's times. It is 1 for a real engine."""
    tallies: Callable[[], Awaitable[Tallies]]

    def counters(self) -> dict[str, float]:
        """Prompt tokens that the engine looked up, found on the GPU, and loaded."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        names = {
            "looked up": "prefix_cache_queries",
            "found": "prefix_cache_hits",
            "loaded": "external_prefix_cache_hits",
        }
        return {shown: _sum(text, name) for shown, name in names.items()}


def _sum(exposition: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^vllm:{name}(?:_total)?\{{.*\}} (\S+)$", exposition, re.MULTILINE)))


Fresh = Callable[[], AbstractContextManager[Stage]]
"""Starts a stage with empty caches. It can be called again and again."""


@contextmanager
def simulated(tier: Tier, speed: float, redis_gb_per_s: float) -> Iterator[Fresh]:
    """Simulated stages with the tier. Each is started anew."""
    yield lambda: _simulated(tier, speed, redis_gb_per_s)


@contextmanager
def _simulated(tier: Tier, speed: float, redis_gb_per_s: float) -> Iterator[Stage]:
    arguments: dict[str, float | str] = {
        "--speed": speed,
        "--num-gpu-blocks": BLOCKS,
        "--prefill-tokens-per-s": PREFILL_TOKENS_PER_S,
        "--decode-s-per-token": DECODE_S_PER_TOKEN,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-bench-")))
        redis_url = _started_redis(stack) if tier.name == REDIS else None
        if tier.chunk_tokens:
            where = f"redis_url={redis_url}" if redis_url else f"cpu_gb={CPU_GB}"
            rate = redis_gb_per_s * 1e9
            arguments["--lmcache"] = f"{where},chunk_tokens={tier.chunk_tokens},redis_read_bytes_per_s={rate:.0f}"
        flat = tuple(str(part) for pair in arguments.items() for part in pair)
        (replica,) = stack.enter_context(running_replicas(folder, 1, flat))

        async def tallies() -> Tallies:
            told = replica.state()["lmcache"]
            if told is None or tier.chunk_tokens is None:
                return Tallies()
            chunk_bytes = SimLmcacheSettings(cpu_gb=CPU_GB, chunk_tokens=tier.chunk_tokens).chunk_kv_bytes
            in_redis = await _asked(redis_url, lambda wire: wire.send("DBSIZE")) if redis_url else 0
            return Tallies(told["held_bytes"], in_redis * chunk_bytes, told["fetched_bytes"])

        yield Stage("simulated", replica.url, MODEL, BLOCK_TOKENS, SIMULATED, speed, tallies)


@contextmanager
def real(tier: Tier) -> Iterator[Fresh]:
    """One real replica with the tier. Its caches are emptied before each use."""
    lmcache.install_lmcache(install.SMALL)
    section: dict[str, Any] | None = None
    if tier.name == CPU:
        section = {"cpu_gb": REAL_CPU_GB, "chunk_tokens": tier.chunk_tokens}
    elif tier.name == REDIS:
        section = {"cpu_gb": _BUFFER_GB, "keep_in_cpu": False, "redis": {}, "chunk_tokens": tier.chunk_tokens}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-bench-")))
        redis_url = _started_redis(stack)
        file = replica_file("r0", redis_url, section, install.SMALL, REAL_BLOCKS)
        (replica,) = stack.enter_context(running(folder, [file]))
        yield lambda: _emptied(replica, redis_url)


@contextmanager
def _emptied(replica: PrintedReplica, redis_url: str) -> Iterator[Stage]:
    with httpx.Client(timeout=60) as http:
        http.post(f"{replica.engine.url}/reset_prefix_cache").raise_for_status()
        http.post(f"{replica.engine.url}/reset_mm_cache").raise_for_status()
        if replica.server is not None:
            http.post(f"{replica.server.url}/cache/clear").raise_for_status()
    asyncio.run(_asked(redis_url, lambda wire: wire.send("FLUSHALL")))
    empty = asyncio.run(_in_redis(redis_url))

    async def tallies() -> Tallies:
        used, read = await _in_redis(redis_url)
        return Tallies(_in_cpu(replica), max(0, used - empty[0]), read - empty[1])

    engine = f"vLLM {install.VERSION} and LMCache {lmcache.VERSION} on CPUs"
    yield Stage(engine, replica.engine.url, install.MODEL, BLOCK_TOKENS_ON_CPUS, REAL, 1.0, tallies)


def _in_cpu(replica: PrintedReplica) -> int:
    if replica.server is None:
        return 0
    status = httpx.get(f"{replica.server.url}/status", timeout=10).raise_for_status().json()
    return int(status["storage_manager"]["l1_manager"]["memory_used_bytes"])


async def _in_redis(url: str) -> tuple[int, int]:
    """The bytes stored in Redis, and the bytes that it has sent to any client."""
    wire = await connect(url)
    try:
        memory, stats = await info(wire, "memory"), await info(wire, "stats")
        return int(memory["used_memory"]), int(stats["total_net_output_bytes"])
    finally:
        await wire.close()


def _started_redis(stack: ExitStack) -> str:
    url = stack.enter_context(embedded_redis())
    asyncio.run(_asked(url, lambda wire: wire.send("PING")))  # returns once Redis serves
    return url


async def _asked(url: str, ask: Callable[[Wire], Awaitable[Any]]) -> Any:
    wire = await connect(url)
    try:
        return await ask(wire)
    finally:
        await wire.close()
