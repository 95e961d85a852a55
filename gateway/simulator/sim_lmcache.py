"""LMCache's server (0.5.6, "MP" mode) beside a replica: chunks of KV in CPU memory, and in a Redis that replicas share.

Before a prompt is scheduled, the server looks for its full chunks, up to the first one that is missing, and fetches
those that only Redis has. The engine meanwhile goes on with other prompts. The server does not know what the GPU holds,
so it fetches all of them. The engine then copies the chunks that the GPU lacks. A prompt's full chunks that were not
found are stored after they are computed; generated tokens are not stored. Copies to the GPU lengthen the engine's
steps.

In Redis, a chunk has the name that LMCache gives it (coordinator/lmcache_chunks.py), as if a real replica had stored
it; its value is a placeholder. The time to fetch it is simulated by a rate. If Redis fails, answers do not: no chunk is
found or kept until Redis is back. KV events do not mention chunks.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from coordinator.errors import StoreError
from coordinator.lmcache_chunks import ChunkTier, ImageSpan, with_images
from coordinator.redis.wire import Wire
from gateway.simulator.prompt import EnginePrompt
from gateway.simulator.sequence import ChunkLookup, TokenSequence
from gateway.simulator.settings import SimLmcacheSettings
from gateway.tasks import Tasks

_STORE_S = 30.0
_BUDGET_S = 2.0
"""The limit for all that fetches one prompt, like `lmcache.redis.max_stall_s` in a replica's file. Nobody waits for
what is stored."""
_BOUNDS_GB_PER_S = (0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1e3, 2.5e3, 5e3, 7.5e3, 1e4)


class SimLmcache:
    """One server for the engines of one replica."""

    def __init__(self, settings: SimLmcacheSettings, model: str, speed: float) -> None:
        """`model` is the name that the replica was started with."""
        self.stats = dict.fromkeys(("fetched_bytes", "held_bytes", "sent_bytes"), 0)
        """Bytes of KV: fetched from Redis since the start, held in CPU memory now, sent to Redis since the start."""
        self._settings = settings
        self._tier = ChunkTier(settings.key_prefix, model, settings.chunk_tokens)
        self._cpu: OrderedDict[str, None] = OrderedDict()
        """Names, least recently used first."""
        self._cpu_chunks = int(settings.cpu_gb * 1e9 // settings.chunk_kv_bytes)
        self.metrics = CollectorRegistry()
        self._loaded = _speeds(self.metrics, "l0_l1_load", device="cuda:0", engine_id="0", model_name=model)
        self._fetched = _speeds(self.metrics, "l2_load", l2_name="valkey")
        self._connecting, self._sending = asyncio.Lock(), asyncio.Lock()
        self._wire: Wire | None = None
        self._speed = speed
        self._tasks = Tasks()
        self.load_s_per_token = settings.kv_bytes_per_token / settings.load_bytes_per_s

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()
        await self._tasks.close()

    def loadable_tokens(self, sequence: TokenSequence, wake: Callable[[], None]) -> int | None:
        """How many leading tokens of its prompt can be loaded. None if that is not known yet; `wake` is called when it
        is."""
        lookup = sequence.lookup
        if lookup is None:
            lookup = sequence.lookup = ChunkLookup(self._chunk_names(sequence.prompt))
            in_cpu = next((at for at, name in enumerate(lookup.names) if name not in self._cpu), len(lookup.names))
            if not self._settings.redis_url or in_cpu == len(lookup.names):
                self._found(lookup, in_cpu)
            else:
                self._tasks.spawn(self._fetch(lookup, in_cpu, wake), "chunks are fetched")
        return None if lookup.found is None else lookup.found * self._settings.chunk_tokens

    def load(self, tokens: int) -> None:
        """The engine's next step copies `tokens` to the GPU."""
        if self._speed > 0:
            self._loaded(tokens * self._settings.kv_bytes_per_token, tokens * self.load_s_per_token / self._speed)

    def store(self, sequence: TokenSequence, computed_tokens: int) -> None:
        """Store the prompt's chunks that are full after `computed_tokens`."""
        lookup = sequence.lookup
        assert lookup is not None
        full = min(computed_tokens // self._settings.chunk_tokens, len(lookup.names))
        new = lookup.names[lookup.offered : full]
        if not new:
            return
        lookup.offered = full
        self._keep_in_cpu(new)
        if self._settings.redis_url:
            self._tasks.spawn(self._send(new), "chunks are stored")
            self.stats["sent_bytes"] += len(new) * self._settings.chunk_kv_bytes

    def clear_cpu(self) -> None:
        """Forget all chunks in CPU memory, like POST /cache/clear."""
        self._cpu.clear()
        self.stats["held_bytes"] = 0

    async def _fetch(self, lookup: ChunkLookup, in_cpu: int, wake: Callable[[], None]) -> None:
        """Fetches chunks from Redis up to the first one that is missing."""
        names, settings, clock = lookup.names[in_cpu:], self._settings, asyncio.get_running_loop().time
        fetched, began_s = 0, clock()
        if there := _leading(await self._ask([("EXISTS", name) for name in names])):
            await self._transfer(there)
            fetched = _leading(await self._ask([("GET", name) for name in names[:there]]))
            self._fetched(there * settings.chunk_kv_bytes, clock() - began_s)
        self.stats["fetched_bytes"] += fetched * settings.chunk_kv_bytes
        self._keep_in_cpu(names[:fetched])
        self._found(lookup, in_cpu + fetched)
        wake()

    async def _send(self, names: Sequence[str]) -> None:
        value = bytes(self._settings.value_bytes)
        async with self._sending:
            for name in names:
                await self._transfer(1)
                await self._ask([("SET", name, value, "EX", self._settings.ttl_s)], _STORE_S)

    async def _transfer(self, chunks: int) -> None:
        """Lets the time pass in which their KV goes to Redis or comes from there."""
        if self._speed > 0:
            settings = self._settings
            await asyncio.sleep(chunks * settings.chunk_kv_bytes / settings.redis_bytes_per_s / self._speed)

    async def _ask(self, commands: Sequence[tuple[Any, ...]], within_s: float = _BUDGET_S) -> list[Any]:
        """Redis' replies; empty if it did not answer in time."""
        url = self._settings.redis_url
        assert url is not None
        try:
            async with asyncio.timeout(within_s):
                async with self._connecting:
                    wire = self._wire = self._wire or await Wire.open(url, within_s, self._lose)
                return list(await asyncio.gather(*(wire.send(*command) for command in commands)))
        except (StoreError, TimeoutError):
            return []

    def _lose(self, _error: StoreError) -> None:
        """The next command opens another connection."""
        lost, self._wire = self._wire, None
        if lost is not None:
            self._tasks.spawn(lost.close(), "a lost connection is closed")

    def _found(self, lookup: ChunkLookup, chunks: int) -> None:
        lookup.found = lookup.offered = chunks
        for name in reversed(lookup.names[:chunks]):  # the deepest chunk will be dropped first
            if name in self._cpu:
                self._cpu.move_to_end(name)

    def _keep_in_cpu(self, names: Sequence[str]) -> None:
        if not self._cpu_chunks:
            return
        for name in reversed(names):
            self._cpu[name] = None
            self._cpu.move_to_end(name)
        while len(self._cpu) > self._cpu_chunks:
            self._cpu.popitem(last=False)
        self.stats["held_bytes"] = len(self._cpu) * self._settings.chunk_kv_bytes

    def _chunk_names(self, prompt: EnginePrompt) -> list[str]:
        tokens = array("I", prompt.tokens)
        spans = (ImageSpan(span.identity, span.start, span.length) for span in prompt.images)
        hashes = self._tier.hashes(with_images(tokens, spans))
        return [self._tier.name(each, prompt.cache_salt or "") for each in hashes]


def _speeds(registry: CollectorRegistry, name: str, **labels: str) -> Callable[[int, float], None]:
    """Takes the bytes and seconds of transfers. Their speeds are a metric in the form that LMCache's OpenTelemetry
    exports. It has no value before the first transfer."""
    labels |= {"otel_scope_name": "lmcache_mp.perf", "otel_scope_schema_url": "", "otel_scope_version": ""}
    full_name = f"lmcache_mp_{name}_throughput_GB_per_second"
    speeds = Histogram(full_name, "Throughput in GB/s.", list(labels), registry=registry, buckets=_BOUNDS_GB_PER_S)

    def record(num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            speeds.labels(**labels).observe(num_bytes / seconds / 1e9)

    return record


def _leading(replies: Sequence[Any]) -> int:
    """How many replies, from the first one on, report an existing key."""
    return next((at for at, reply in enumerate(replies) if not reply), len(replies))
