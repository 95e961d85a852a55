"""Runs `kvgate` as users do: in another process, with its output and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gateway.ops.cli import main
from gateway.ops.local.ports import free_ports
from gateway.ops.local.state_dir import read_processes
from tests.forked import build_commands_once

build_commands_once()
COMMAND = [sys.executable, "-P", "-m", "gateway.ops.cli"]


@dataclass
class Kvgate:
    """The command, with its own state directory and its own free port for `up`."""

    folder: Path
    port: int

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
        return {**kept, "COLUMNS": "100"}

    def run(
        self, *arguments: str, stdin: str = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            env={**self.environment, **(env or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def call(
        self, *arguments: str, stdin: str = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Like `run`, but in this process. It saves half a second, and is for commands that start no process."""
        typed, shown, complained = io.TextIOWrapper(io.BytesIO(stdin.encode())), io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {**self.environment, **(env or {})}, clear=True),
            mock.patch.object(sys, "argv", ["kvgate", *arguments]),
            mock.patch.object(sys, "stdin", typed),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(complained),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        code = ended.value.code
        status = code if isinstance(code, int) else int(code is not None)
        return subprocess.CompletedProcess(arguments, status, shown.getvalue(), complained.getvalue())

    def up(self, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(*self.up_command(*options), env=env)

    def refused_up(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Like `up` with --detach, but in this process: for one that is refused before it starts anything."""
        return self.call(*self.up_command("--detach", *options))

    def up_command(self, *options: str) -> list[str]:
        return ["up", "--port", str(self.port), "--state-dir", str(self.state_dir), "--speed", "0", *options]

    @contextmanager
    def up_in_foreground(self, *options: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """An `up` in the foreground. It is killed at the end if it still runs."""
        command = [*COMMAND, *self.up_command(*options)]
        with subprocess.Popen(
            command, env=self.environment | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state_dir / "cluster.json").read_text())
        return found

    def alive(self) -> list[str]:
        """The ids of the cluster's running processes."""
        return [process.id for process in read_processes(self.state_dir) if process.is_alive()]


def _kvgate(folder: Path) -> Iterator[Kvgate]:
    kvgate = Kvgate(folder, free_ports(1)[0])
    yield kvgate
    if kvgate.state_dir.exists():
        kvgate.call("down", "--state-dir", str(kvgate.state_dir))
        assert kvgate.alive() == []
    Path(tempfile.gettempdir(), f"kvgate-port-{kvgate.port}.lock").unlink(missing_ok=True)


@pytest.fixture
def kvgate(tmp_path: Path) -> Iterator[Kvgate]:
    yield from _kvgate(tmp_path)


@pytest.fixture(scope="module")
def shared_kvgate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvgate]:
    """For tests of one module that read the same cluster and do not change it."""
    yield from _kvgate(tmp_path_factory.mktemp("kvgate"))
