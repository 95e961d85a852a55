"""One light replica: its engine, its HTTP server, and its agent if there is a Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson

from bench.fleet.agents import LightAgent, LightProbe
from bench.fleet.engine import LightEngine
from bench.fleet.settings import LightSettings
from coordinator.agent.kv_events import Event
from gateway.simulator.images import ImageReader
from gateway.tasks import Tasks

VERSION = "0.32.0"
_JSON = b"application/json"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 503: b"Service Unavailable"}


def whole(status: int, body: bytes, kind: bytes = _JSON, more: bytes = b"") -> bytes:
    """A complete answer. `more` has further lines of its head, each with its line end."""
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n"
    return head % (status, _REASONS.get(status, b"Error"), kind, len(body), more) + body


_NOT_FOUND = whole(404, b'{"detail":"Not Found"}')


class LightReplica:
    """One replica."""

    def __init__(
        self,
        index: int,
        address: str,
        port: int,
        settings: LightSettings,
        redis_url: str = "",
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        """Without a `redis_url` it has no agent. `turns` limits how many agents connect at the same time."""
        self.id = f"r{index}"
        self.settings = settings
        self.images = ImageReader()
        self.connections: set[asyncio.Transport] = set()
        self.num_requests = 0
        self.engine = LightEngine(settings, self._publish)
        self._address, self._port = address, port
        self._started_s = time.time()
        self._tasks = Tasks()
        url = f"http://{self._address}:{port}"
        probe = LightProbe(url, settings.model, self.exposition)
        turns = turns or asyncio.Semaphore(1)
        self.agent = LightAgent(redis_url, self.id, probe, turns) if redis_url else None

    async def start(self, connected: Callable[[LightReplica], asyncio.Protocol]) -> None:
        """Listen, and start the agent. `connected` makes what reads a connection. Raises OSError if the port is
        taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: connected(self), self._address, self._port, backlog=512)
        if self.agent is not None:
            self._tasks.keep(self.agent.run, "agent")

    async def follows(self) -> None:
        """Wait until its events reach Redis. Returns at once if there is no Redis."""
        if self.agent is not None:
            await self.agent.follows.wait()

    async def stop(self) -> None:
        """Stop listening, break all connections, and let the agent give its lease back."""
        self._server.close()
        for connection in tuple(self.connections):
            connection.abort()
        await self._tasks.close()

    def _publish(self, events: list[Event]) -> None:
        if self.agent is not None:
            self.agent.publish(events)

    def get(self, path: str) -> bytes:
        """The answer to a GET."""
        match path:
            case "/health" | "/ping":
                return whole(200, b"")
            case "/v1/models":
                return whole(200, orjson.dumps({"object": "list", "data": [self._card()]}))
            case "/version":
                return whole(200, orjson.dumps({"version": VERSION}))
            case "/kv_event_sources":
                return whole(200, b"{}")  # its agent is here, so nobody else can subscribe
            case "/metrics":
                return whole(200, self.exposition().encode(), b"text/plain; version=0.0.4; charset=utf-8")
            case "/sim/state":
                return whole(200, orjson.dumps(self.state()))
        return _NOT_FOUND

    def post(self, path: str) -> bytes:
        """The answer to a POST that generates nothing."""
        if path in ("/reset_prefix_cache", "/sim/reset_cache"):
            return whole(200, orjson.dumps({"reset": self.engine.clear_cache()}))
        return _NOT_FOUND

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.settings.served_name,
            "object": "model",
            "created": int(self._started_s),
            "owned_by": "vllm",
            "root": self.settings.model,
            "parent": None,
            "max_model_len": self.settings.capacity_tokens,
            "permission": [],
        }

    def exposition(self) -> str:
        """The metrics that gateways and agents read, under vLLM's names."""
        engine, stats, settings = self.engine, self.engine.stats, self.settings
        values: dict[str, float] = {
            "num_requests_running": len(engine.running),
            "num_requests_waiting": len(engine.waiting),
            "kv_cache_usage_perc": engine.cache.num_held / engine.cache.num_blocks,
            "prefix_cache_queries_total": stats.prefix_queries_tokens,
            "prefix_cache_hits_total": stats.prefix_hits_tokens,
            "prompt_tokens_total": stats.prompt_tokens,
            "generation_tokens_total": engine.generated_tokens(),
            "request_success_total": sum(stats.requests.values()) - stats.requests["abort"],
            "request_prefill_time_seconds_sum": stats.prefill_s,
            "request_prefill_time_seconds_count": stats.prefills,
            "request_prefill_kv_computed_tokens_sum": stats.prefill_computed_tokens,
            "request_prefill_kv_computed_tokens_count": stats.prefills,
        }
        labels = f'{{model_name="{settings.served_name}",engine="0"}}'
        lines = [f"process_start_time_seconds {self._started_s:.3f}"]
        lines += [f"vllm:{name}{labels} {value}" for name, value in values.items()]
        size = f'block_size="{settings.block_tokens}",num_gpu_blocks="{settings.num_blocks}"'
        lines.append(f'vllm:cache_config_info{{{size},enable_prefix_caching="True",engine="0"}} 1.0\n')
        return "\n".join(lines)

    def state(self) -> dict[str, int]:
        """Its own report, under the names of the simulator's /sim/state."""
        engine, stats = self.engine, self.engine.stats
        return {
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "requests": self.num_requests,
            "aborted": stats.requests["abort"],
            "blocks_used": engine.cache.num_held,
            "blocks_cached": engine.cache.num_cached,
            "blocks_stored": stats.blocks_stored,
            "blocks_evicted": stats.blocks_evicted,
            "prompt_tokens": stats.prefix_queries_tokens,
            "cached_tokens": stats.prefix_hits_tokens,
        }
