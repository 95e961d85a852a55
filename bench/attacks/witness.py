"""Watches a gateway during an attack: /health, memory, and an honest client.

    python -m bench.attacks.witness --url http://127.0.0.1:8080 --pid PID

It is a separate process, so that the attacker's CPU time does not count as the gateway's. It watches the idle gateway
first, then prints `ready` and watches the attack. A line on its stdin says that the attack is over. Then it waits
until memory is back, or 10 s, prints its result as JSON, and ends.

Linux counts how long a thread waits for a core (schedstat). `held_ms` is a delay without such waits, because other
work on the machine must not count as the gateway's. The wait of the gateway's main thread or of the witness is
subtracted, whichever is longer. Only one is subtracted, since both may have waited at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bench.attacks.row import BACK_WITHIN_MB
from bench.attacks.target import chat, head, post
from bench.trees import rss_bytes, tree

PROBE_S, HONEST_S = 0.005, 0.02
_SETTLES_S, _SETTLES_AT_LEAST_S = 10.0, 1.5
_STUCK_S = 0.5
_LOOK_S, _LOOKS_A_TREE = 0.02, 12
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_CODE = re.compile(rb'"code": ?"(\w+)"')


def waited_s(pid: int) -> float:
    """How long a process' main thread has waited for a core. 0 if Linux does not tell, or the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class Line:
    """A client's connection. It is opened again after it closes."""

    def __init__(self, host: str, port: int, source: str) -> None:
        self._at = (host, port)
        self._source = source
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, str]:
        """Returns an answer's status and error code. Raises OSError or IncompleteReadError if there is none."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(*self._at, local_addr=(self._source, 0))
            reader, writer = self._streams
            writer.write(request)
            first = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(first)
            body = await reader.readexactly(int(length[1]) if length else 0)
        except (OSError, asyncio.IncompleteReadError):
            self._hang_up()
            raise
        if b"connection: close" in first.lower():
            self._hang_up()
        status, code = _STATUS.match(first), _CODE.search(body)
        return int(status[1]) if status else 0, code[1].decode() if code else ""

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


@dataclass
class Seen:
    """A client's observations since the last reset."""

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Counts by status and code, or by how the connection ended."""
    worst_ms: float = 0.0
    held_ms: float = 0.0
    """The worst delay without the time of waiting for a core."""


class Client:
    """Sends the same request at a steady pace and measures. A request that is unanswered at the end counts as well."""

    def __init__(self, line: Line, request: bytes, every_s: float, pid: int) -> None:
        self._line, self._request, self._every_s = line, request, every_s
        self._pids = (pid, os.getpid())
        self._since: tuple[float, list[float]] | None = None
        self.seen = Seen()

    async def run(self) -> None:
        while True:
            started_s = time.perf_counter()
            self._since = started_s, self._waited_s()
            try:
                status, code = await self._line.ask(self._request)
            except (OSError, asyncio.IncompleteReadError):
                self.seen.refused["connection lost"] += 1
            else:
                if status == 200:
                    self.seen.answered += 1
                else:
                    self.seen.refused[f"{status} {code}".strip()] += 1
            self.note()
            self._since = None
            await asyncio.sleep(max(0.0, started_s + self._every_s - time.perf_counter()))

    def stuck_s(self) -> float:
        """How long it has waited for an answer that has not come yet."""
        return time.perf_counter() - self._since[0] if self._since else 0.0

    def note(self) -> None:
        """Counts the current wait so far."""
        if self._since is None:
            return
        delay_ms = self.stuck_s() * 1000
        waited_ms = 1000 * max(now - at for now, at in zip(self._waited_s(), self._since[1], strict=True))
        self.seen.worst_ms = max(self.seen.worst_ms, delay_ms)
        self.seen.held_ms = max(self.seen.held_ms, delay_ms - max(0.0, waited_ms))

    def _waited_s(self) -> list[float]:
        return [waited_s(pid) for pid in self._pids]


class Memory(threading.Thread):
    """Measures a process tree's memory all the time. Kills a tree that exceeds the cap: it would take the machine's
    memory."""

    def __init__(self, root: int, cap_mb: float) -> None:
        super().__init__(daemon=True)
        self._root, self._cap_mb = root, cap_mb
        self._pids = tree([root])
        self.now_mb = self.peak_mb = self._measure()
        self.is_killed = False

    def run(self) -> None:
        look = threading.Event()
        while not look.wait(_LOOK_S):
            for _ in range(_LOOKS_A_TREE):
                self.now_mb = self._measure()
                self.peak_mb = max(self.peak_mb, self.now_mb)
                if self.now_mb > self._cap_mb:
                    self._kill()
                look.wait(_LOOK_S)
            self._pids = tree([self._root])

    def _measure(self) -> float:
        return sum(map(rss_bytes, self._pids)) / 1e6

    def _kill(self) -> None:
        self.is_killed = True
        for pid in tree([self._root]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Witness:
    """All observers."""

    def __init__(self, options: argparse.Namespace) -> None:
        at = urlsplit(options.url)
        self._pid = options.pid
        self._memory = Memory(options.pid, options.cap_mb)

        def client(request: bytes, every_s: float) -> Client:
            return Client(Line(at.hostname or "", at.port or 80, options.source), request, every_s, options.pid)

        self._health = client(head("GET", "/health"), PROBE_S)
        self._honest = client(b"".join(post("/v1/chat/completions", chat())), HONEST_S)

    async def watch(self, idle_s: float) -> dict[str, object]:
        self._memory.start()
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(one.run()) for one in (self._health, self._honest)]
            await asyncio.sleep(idle_s)
            idle, before_mb = self._health.seen, self._memory.now_mb
            self._health.seen, self._honest.seen = Seen(), Seen()
            self._memory.peak_mb = before_mb
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.readline)
            await self._settle(before_mb)
            for one in clients:
                one.cancel()
        return {"idle_ms": idle.worst_ms, "before_mb": before_mb, **self._found()}

    async def _settle(self, before_mb: float) -> None:
        """Waits until memory is back and no client waits, but not too long."""
        over_s = time.perf_counter()
        while (spent_s := time.perf_counter() - over_s) < _SETTLES_S and self._is_alive():
            is_back = self._memory.now_mb <= before_mb + BACK_WITHIN_MB
            if spent_s > _SETTLES_AT_LEAST_S and is_back and self._health.stuck_s() < _STUCK_S:
                break
            await asyncio.sleep(PROBE_S)
        self._health.note()
        self._honest.note()

    def _is_alive(self) -> bool:
        return rss_bytes(self._pid) > 0

    def _found(self) -> dict[str, object]:
        health, honest = self._health.seen, self._honest.seen
        return {
            "health_ms": health.worst_ms,
            "held_ms": health.held_ms,
            "health_failed": health.refused.total(),
            "peak_mb": self._memory.peak_mb,
            "after_mb": self._memory.now_mb,
            "is_killed": self._memory.is_killed,
            "is_alive": self._is_alive(),
            "honest_answered": honest.answered,
            "honest_refused": dict(honest.refused),
            "honest_ms": honest.worst_ms,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attacks.witness", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True, help="the gateway's pid; its child processes are included")
    parser.add_argument("--source", default="127.0.0.1", help="the honest client's address")
    parser.add_argument("--idle-s", type=float, default=2.0)
    parser.add_argument("--cap-mb", type=float, default=3000.0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(Witness(options).watch(options.idle_s))))


if __name__ == "__main__":
    main()
