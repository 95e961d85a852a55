"""The Redis of a stage: one server, or a master with two replicas and three sentinels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.faults.program import Program, end_all
from coordinator.errors import StoreError
from coordinator.redis.address import connect
from coordinator.redis.wire import Wire
from gateway.ops.local.embedded_redis import find_redis_server
from gateway.ops.local.ports import free_ports

_MASTER = "the-master"
_POLL_S = 0.02
_CONNECT_S, _ANSWER_S = 0.5, 2.0
_STARTS_WITHIN_S = 20.0


class Line:
    """A connection to Redis past every proxy. The caller gets the error that breaks it. The next call opens another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wire: Wire | None = None

    async def ask(self, *command: Any) -> Any:
        """Returns the reply as raw bytes. Raises StoreError."""
        if self._wire is None:
            self._wire = await connect(self._url, "kvgate:-", _CONNECT_S, self._broke)
        return await self._wire.send(*command, budget_s=_ANSWER_S)

    def _broke(self, _: StoreError) -> None:
        self._wire = None

    async def close(self) -> None:
        if self._wire is not None:
            await self._wire.close()


class Redis:
    """One server. The cluster uses `url`."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.server = Program("redis", find_redis_server().command(self.port, _made(folder / "redis")), folder / "log")
        self.line = Line(self.url)

    async def start(self) -> None:
        self.server.start()
        await until(self.answers, _STARTS_WITHIN_S, "Redis")

    async def answers(self) -> bool:
        with suppress(StoreError):
            return bool(await self.line.ask("PING") == b"PONG")
        return False

    async def close(self) -> None:
        await self.line.close()
        await end_all([self.server])


class Sentinels:
    """A master with two replicas, watched by three sentinels. Another server becomes master a second or two after the
    master dies. As Redis' documentation asks, a master without replicas refuses writes."""

    def __init__(self, folder: Path) -> None:
        binary, ports = str(find_redis_server().path), free_ports(6)
        self._folder, self._ports = folder, ports[:3]
        self.servers = [Program(f"redis {port}", self._server(binary, port), folder / "log") for port in ports[:3]]
        self._sentinels = [
            Program(f"sentinel {port}", self._sentinel(binary, port), folder / "log") for port in ports[3:]
        ]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[3:])
        self.url = f"redis+sentinel://{hosts}/{_MASTER}/0"
        self.line = Line(self.url)
        self._asked = [Line(f"redis://127.0.0.1:{port}/0") for port in ports[3:]]

    def _server(self, binary: str, port: int) -> list[str]:
        options = (
            f"--port {port} --bind 127.0.0.1 --appendonly no --repl-diskless-sync-delay 0 --min-replicas-to-write 1"
        )
        options += " --repl-ping-replica-period 1"
        options += f" --replicaof 127.0.0.1 {self._ports[0]}" if port != self._ports[0] else ""
        return [binary, *options.split(), "--save", "", "--dir", str(_made(self._folder / str(port)))]

    def _sentinel(self, binary: str, port: int) -> list[str]:
        home = _made(self._folder / str(port))
        file = home / "sentinel.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {home}\nsentinel monitor {_MASTER} 127.0.0.1 {self._ports[0]} 2\n"
            f"sentinel down-after-milliseconds {_MASTER} 500\nsentinel failover-timeout {_MASTER} 2000\n"
        )
        return [binary, str(file), "--sentinel"]

    async def start(self) -> None:
        for server in self.servers:
            server.start()
        await asyncio.sleep(0.5)  # a sentinel that finds no master on its first look tries again a second later
        for sentinel in self._sentinels:
            sentinel.start()
        await until(self._is_whole, _STARTS_WITHIN_S, "the sentinels")

    async def _is_whole(self) -> bool:
        """Whether each sentinel knows the others and two replicas that are in step."""
        try:
            for line in self._asked:
                told = _pairs(await line.ask("SENTINEL", "MASTER", _MASTER))
                replicas = [_pairs(each) for each in await line.ask("SENTINEL", "REPLICAS", _MASTER)]
                in_step = [one for one in replicas if one["master-link-status"] == "ok"]
                if (told["flags"], told["num-other-sentinels"], len(in_step)) != ("master", "2", 2):
                    return False
        except StoreError:
            return False
        return True

    async def master(self) -> Program:
        """Raises StoreError if the sentinels do not answer."""
        _, port = await self._asked[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _MASTER)
        return self.servers[self._ports.index(int(port))]

    async def takes_writes(self, after: Program) -> bool:
        """Whether another server is the master and takes writes."""
        with suppress(StoreError):
            if await self.master() is not after:
                await self.line.ask("SET", "kvgate:test:written", "1", "PX", "1000")
                return True
        return False

    async def answers(self) -> bool:
        with suppress(StoreError):
            return bool(await self.line.ask("PING") == b"PONG")
        return False

    async def close(self) -> None:
        for line in (self.line, *self._asked):
            await line.close()
        await end_all([*self._sentinels, *self.servers])


async def until(condition: Callable[[], Any], within_s: float, what: str) -> None:
    """Waits for the condition, which may be a coroutine. Raises TimeoutError if it does not come true."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise TimeoutError(f"{what}: not there within {within_s:g} s") from None


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [each.decode() for each in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
