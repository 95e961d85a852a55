"""What each part of the fleet costs: its CPU time and its memory, and the bytes into and out of Redis."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.embedded import connect, info
from bench.machine import IdleShare
from bench.trees import cpu_s, rss_bytes, tree
from coordinator.redis.wire import Wire
from gateway.tasks import Tasks

GATEWAYS, REDIS, REPLICAS, CLIENTS = "gateways", "redis", "replicas", "clients"
PARTS = (GATEWAYS, REDIS, REPLICAS, CLIENTS)
"""`replicas` are the light replicas and their agents. `clients` are this process."""
_SAMPLE_S = 2.0


@dataclass
class Used:
    """What the parts used during one run."""

    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By part: the CPU time of all its processes together."""
    rss_mb: dict[str, float] = field(default_factory=dict)
    """By part: the most memory of all its processes together."""
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """The memory by part at moments of the run, in seconds since its start."""
    redis_in_bytes: int = 0
    redis_out_bytes: int = 0
    redis_memory_mb: float = 0.0
    redis_keys: int = 0
    idle: float = 0.0
    """The machine's idle share."""

    def memory_at(self, at_s: float) -> dict[str, float]:
        """The memory of each part at the last moment before `at_s`."""
        found = [memory for moment_s, memory in self.memory if moment_s <= at_s] or [{}]
        return {f"{part}_mb": round(mb, 1) for part, mb in found[-1].items()}

    def figures(self, requests: int, beside: Used | None = None) -> dict[str, float]:
        """The share of a core that each part used, its memory, and its CPU time for a request. With `beside`, the use
        of the same parts without requests, that does not count as a request's."""
        found: dict[str, float] = {}
        for part, used_s in self.cpu_s.items():
            found[f"{part}_core"] = round(used_s / self.seconds, 3)
            base_s = beside.cpu_s[part] / beside.seconds * self.seconds if beside is not None else 0.0
            found[f"{part}_us"] = round((used_s - base_s) / requests * 1e6, 1) if requests else 0.0
            found[f"{part}_mb"] = round(self.rss_mb[part], 1)
        return found | {
            "redis_in_kb_s": round(self.redis_in_bytes / self.seconds / 1e3, 1),
            "redis_out_kb_s": round(self.redis_out_bytes / self.seconds / 1e3, 1),
            "redis_used_mb": round(self.redis_memory_mb, 1),
            "redis_keys": self.redis_keys,
            "idle": round(self.idle, 3),
        }


class Meter:
    """Measures the parts of one stage. `pids` are the roots of each part's processes."""

    def __init__(self, pids: Mapping[str, Sequence[int]], redis_url: str) -> None:
        self._pids = dict(pids)
        self._redis_url = redis_url

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[Used]:
        """Measures from here to the end of the block, and then fills in what it yields."""
        wire = await connect(self._redis_url)
        pids = self._pids | {REDIS: [int((await info(wire, "server"))["process_id"])]}
        used, tasks = Used(), Tasks()
        before, bytes_before, idle, began_s = _cpu_s(pids), await _bytes(wire), IdleShare(), time.perf_counter()
        tasks.spawn(_watch_memory(pids, used, began_s), "memory")
        try:
            yield used
        finally:
            used.seconds, used.idle = time.perf_counter() - began_s, idle()
            used.cpu_s = {part: after - before[part] for part, after in _cpu_s(pids).items()}
            into, out = await _bytes(wire)
            used.redis_in_bytes, used.redis_out_bytes = into - bytes_before[0], out - bytes_before[1]
            used.redis_memory_mb = int((await info(wire, "memory"))["used_memory"]) / 1e6
            used.redis_keys = int(await wire.send("DBSIZE"))
            used.memory.append((used.seconds, _memory_mb(pids)))
            used.rss_mb = {part: max(memory[part] for _, memory in used.memory) for part in PARTS}
            await tasks.close()
            await wire.close()


def _cpu_s(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {part: time.process_time() if part == CLIENTS else cpu_s(pids.get(part, ())) for part in PARTS}


async def _watch_memory(pids: Mapping[str, Sequence[int]], used: Used, began_s: float) -> None:
    while True:
        used.memory.append((time.perf_counter() - began_s, _memory_mb(pids)))
        await asyncio.sleep(_SAMPLE_S)


def _memory_mb(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    members = {part: {os.getpid()} if part == CLIENTS else tree(pids.get(part, ())) for part in PARTS}
    return {part: sum(map(rss_bytes, found)) / 1e6 for part, found in members.items()}


async def _bytes(wire: Wire) -> tuple[int, int]:
    """The bytes into and out of Redis since its start."""
    found = await info(wire, "stats")
    return int(found["total_net_input_bytes"]), int(found["total_net_output_bytes"])
