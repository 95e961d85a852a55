"""Child processes: they are distinguishable, stop in order, and never outlive a foreground parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.ops.local.processes import Children, Process, stop, tail, wait_until

SLEEP = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
DEAF = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()",
]


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    started = Children(os.environ, die_with_parent=False)
    yield started
    for process in started.processes:
        process.signal(signal.SIGKILL)
    assert await wait_until(lambda: not any(process.is_alive() for process in started.processes), 20)
    started.newly_exited()  # reaps them


async def speaking(process: Process) -> Process:
    """Waits until the process has written its first line, because its signal handlers are set by then."""
    assert await wait_until(lambda: process.log.read_text() == "up\n", 20)
    return process


async def test_a_process_is_told_apart_from_a_later_one_with_its_pid(children: Children, tmp_path: Path) -> None:
    process = await speaking(children.start("replica", "r0", SLEEP, tmp_path / "log"))
    namesake = replace(process, start_ticks=process.start_ticks - 1)
    assert process.is_alive()
    assert not namesake.is_alive()
    assert (await stop([namesake])).running == 0
    assert process.is_alive()


async def test_stopping_asks_gateways_first_and_redis_last(children: Children, tmp_path: Path) -> None:
    record = tmp_path / "record"
    tell = (
        "import signal, sys, os\n"
        "def told(*_):\n open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, told); print('up', flush=True)\n"
        "while True: signal.pause()"
    )
    for kind in ("redis", "agent", "gateway", "replica"):
        command = [sys.executable, "-c", tell, str(record), kind]
        await speaking(children.start(kind, kind, command, tmp_path / kind))  # type: ignore[arg-type]
    stopped = await stop(children.processes)
    first, *others, last = record.read_text().split()
    assert (first, set(others), last) == ("gateway", {"agent", "replica"}, "redis")
    assert str(stopped) == "stopped 4 processes"


async def test_processes_that_are_deaf_are_gone_within_5_s(children: Children, tmp_path: Path) -> None:
    for kind in ("gateway", "agent", "replica", "redis"):
        await speaking(children.start(kind, kind, DEAF, tmp_path / kind))  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        stopped = await stop(children.processes)
    assert len(stopped.killed) == 4


async def test_secrets_are_in_a_childs_environment_and_not_on_its_command_line(
    children: Children, tmp_path: Path
) -> None:
    secrets = {"KVGATE_REDIS_URL": "redis://:password@h"}
    child = children.start("agent", "agent-r0", SLEEP, tmp_path / "log", secrets)
    await speaking(child)
    proc = Path(f"/proc/{child.pid}")
    assert b"KVGATE_REDIS_URL=redis://:password@h" in (proc / "environ").read_bytes().split(b"\0")
    assert b"password" not in (proc / "cmdline").read_bytes()


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert tail(log, lines=2) == "line 98\nline 99"
    assert "no log" in tail(tmp_path / "missing")
