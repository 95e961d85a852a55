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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import structlog
import uvloop

from bench.fleet.endpoints import EndpointsApi
from bench.fleet.exchange import Exchange
from bench.fleet.replica import LightReplica
from bench.fleet.settings import LightSettings
from gateway.ops.local.ports import free_ports

_AGENTS_AT_ONCE = 20
_LIMIT_BYTES = 2**20
_PER_SUBNET = 250
_ROOT = Path(__file__).parents[2]


def address_of(index: int) -> str:
    """The address of the replica with this number."""
    return f"127.1.{index // _PER_SUBNET}.{index % _PER_SUBNET + 1}"


class _Process:
    """All replicas of this process, by id."""

    def __init__(self, port: int, settings: LightSettings, redis_url: str) -> None:
        self._port, self._settings, self._redis_url = port, settings, redis_url
        self._replicas: dict[str, LightReplica] = {}
        self._turns = asyncio.Semaphore(_AGENTS_AT_ONCE)
        self._api = EndpointsApi(port)

    async def start(self, numbers: Sequence[int]) -> None:
        """Returns when their agents follow them."""
        shared = self._port, self._settings, self._redis_url, self._turns
        started = [LightReplica(number, address_of(number), *shared) for number in numbers]
        for replica in started:
            await replica.start(Exchange)
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
