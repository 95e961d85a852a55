"""Light replicas: hundreds of OpenAI-compatible replicas in one process, each with its own address and its own agent.

    python -m bench.fleet.replicas --count 240 --port 20100 --api-port 20101

A program starts them with `light_replicas`:

    with embedded_redis() as redis_url, light_replicas(240, LightSettings(num_blocks=4000), redis_url) as fleet:
        with running_gateways(fleet.urls, gateways=8, redis_url=redis_url) as cluster:
            ...
            fleet.state()["r17"]["cached_tokens"]

They listen on 127.1.x.y, all on one port, as pods do. So they can be found by DNS and in EndpointSlices. The process
reads commands from its standard input, one JSON document a line, and answers each with one line. It ends when its
standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import structlog
import uvloop

from bench.fleet.agents import LightAgent, LightProbe
from bench.fleet.endpoints import EndpointsApi
from bench.fleet.engine import LightEngine
from bench.fleet.exchange import Exchange, whole
from bench.fleet.settings import LightSettings
from coordinator.agent.kv_events import Event
from gateway.ops.local.ports import free_ports
from gateway.simulator.images import ImageReader
from gateway.tasks import Tasks

VERSION = "0.32.0"
_NOT_FOUND = whole(404, b'{"detail":"Not Found"}')
_AGENTS_AT_ONCE = 20
_LIMIT_BYTES = 2**20
_PER_SUBNET = 250
_ROOT = Path(__file__).parents[2]


def address_of(index: int) -> str:
    """The address of the replica with this number."""
    return f"127.1.{index // _PER_SUBNET}.{index % _PER_SUBNET + 1}"


class LightReplica:
    """One replica: its engine, its HTTP server, and its agent if there is a Redis."""

    def __init__(
        self,
        index: int,
        port: int,
        settings: LightSettings,
        redis_url: str = "",
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        """Without a `redis_url` it has no agent. `turns` limits how many agents connect at the same time."""
        self.id = f"r{index}"
        self.settings = settings
        self.images = ImageReader()
        self.connections: set[Exchange] = set()
        self.num_requests = 0
        self.engine = LightEngine(settings, self._publish)
        self._address, self._port = address_of(index), port
        self._started_s = time.time()
        self._tasks = Tasks()
        url = f"http://{self._address}:{port}"
        probe = LightProbe(url, settings.model, self.exposition)
        turns = turns or asyncio.Semaphore(1)
        self.agent = LightAgent(redis_url, self.id, probe, turns) if redis_url else None

    async def start(self) -> None:
        """Listen, and start the agent. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Exchange(self), self._address, self._port, backlog=512)
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
            connection.close()
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


class _Process:
    """All replicas of this process, by id."""

    def __init__(self, port: int, settings: LightSettings, redis_url: str) -> None:
        self._port, self._settings, self._redis_url = port, settings, redis_url
        self._replicas: dict[str, LightReplica] = {}
        self._turns = asyncio.Semaphore(_AGENTS_AT_ONCE)
        self._api = EndpointsApi(port)

    async def start(self, numbers: Sequence[int]) -> None:
        """Returns when their agents follow them."""
        started = [LightReplica(number, self._port, self._settings, self._redis_url, self._turns) for number in numbers]
        for replica in started:
            await replica.start()
            self._replicas[replica.id] = replica
        for replica in started:
            await replica.follows()

    async def stop(self, ids: Iterable[str]) -> None:
        await asyncio.gather(*(self._replicas.pop(each).stop() for each in list(ids)))

    async def do(self, asked: dict[str, Any]) -> Any:
        """One command."""
        if "start" in asked:
            await self.start(asked["start"])
        elif "stop" in asked:
            await self.stop(asked["stop"])
        elif "publish" in asked:
            self._api.publish({each: address_of(int(each[1:])) for each in asked["publish"]})
        else:
            return {each: replica.state() for each, replica in self._replicas.items()}
        return True

    async def run(self, numbers: range, api_port: int) -> None:
        """Serve until the standard input ends."""
        loop = asyncio.get_running_loop()
        commands = asyncio.StreamReader(_LIMIT_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        try:
            await self.start(numbers)
            await self.do({"publish": list(self._replicas)})
            await self._api.start(api_port)
            _tell({f"r{number}": replica_url(number, self._port) for number in numbers})
            while line := await commands.readline():
                _tell(await self.do(orjson.loads(line)))
        finally:
            await self.stop(self._replicas)


def replica_url(index: int, port: int) -> str:
    return f"http://{address_of(index)}:{port}"


def _tell(document: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(document) + b"\n")
    sys.stdout.flush()


class LightReplicas:
    """The process of light replicas as its parent sees it. Each method waits for the process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, api_port: int, numbers: range) -> None:
        """Waits until the first replicas run."""
        self.pid = process.pid
        self.api_url = f"http://127.0.0.1:{api_port}"
        """A Kubernetes API with the published replicas in EndpointSlices (bench/fleet/endpoints.py). At first, all
        replicas are published."""
        self.port = port
        self._process = process
        self._turn = threading.Lock()
        self.urls: dict[str, str] = self.answer()
        """By replica; those that run."""
        self._next = numbers.stop

    def state(self) -> dict[str, dict[str, int]]:
        """Each replica's own report: requests, prompt_tokens, cached_tokens, running, waiting, …"""
        found: dict[str, dict[str, int]] = self.ask({"state": True})
        return found

    def start(self, count: int) -> list[str]:
        """Start this many more replicas, with new ids. Returns the ids when their agents follow them."""
        numbers = range(self._next, self._next + count)
        self._next += count
        self.ask({"start": list(numbers)})
        self.urls |= {f"r{number}": replica_url(number, self.port) for number in numbers}
        return [f"r{number}" for number in numbers]

    def stop(self, ids: Iterable[str]) -> None:
        """Stop these replicas at once, whatever they answer now."""
        ids = list(ids)
        self.ask({"stop": ids})
        for each in ids:
            del self.urls[each]

    def publish(self, ids: Iterable[str]) -> None:
        """From now on, the EndpointSlices have these replicas."""
        self.ask({"publish": list(ids)})

    def ask(self, command: dict[str, Any]) -> Any:
        """Send a command, and wait for its answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        with self._turn:
            self._process.stdin.write(orjson.dumps(command) + b"\n")
            self._process.stdin.flush()
            return self.answer()

    def answer(self) -> Any:
        """The next line of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of light replicas has ended")
        return orjson.loads(line)


@contextmanager
def light_replicas(
    count: int, settings: LightSettings | None = None, redis_url: str = "", first: int = 0
) -> Iterator[LightReplicas]:
    """Starts light replicas in one process, and stops them at the end: r0, r1, … or from the number `first` on. With a
    Redis, each has an agent, and all agents follow their engines when this yields. `urls` has their URLs."""
    settings = settings or LightSettings()
    port, api_port = free_ports(2)
    options = [
        "--first",
        str(first),
        "--count",
        str(count),
        "--port",
        str(port),
        "--api-port",
        str(api_port),
        "--settings",
        json.dumps(asdict(settings)),
    ]
    options += ["--redis-url", redis_url]
    command = [sys.executable, "-m", "bench.fleet.replicas", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT) as process:
        try:
            yield LightReplicas(process, port, api_port, range(first, first + count))
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet.replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first replica")
    parser.add_argument("--count", type=int, required=True, help="how many replicas")
    parser.add_argument("--port", type=int, required=True, help="the port on which all of them listen")
    parser.add_argument("--api-port", type=int, required=True, help="the port of the Kubernetes API that lists them")
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of LightSettings, as JSON")
    parser.add_argument("--redis-url", default="", help="where their agents publish; without it there are no agents")
    options = parser.parse_args()
    structlog.configure(  # the standard output is for answers to commands
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    settings = LightSettings(**options.settings)
    gc.disable()  # to look at the blocks of hundreds of caches takes seconds; and what a request needs is in no cycle
    process = _Process(options.port, settings, options.redis_url)
    uvloop.run(process.run(range(options.first, options.first + options.count), options.api_port))


if __name__ == "__main__":
    main()
