"""Pickers as processes, beside the gateways of a cluster or in their place."""

from __future__ import annotations

import itertools
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.cluster import KVGATE, Cluster
from bench.peers import DoesNotStart
from bench.streams import STREAMS
from gateway.ops.local.ports import free_ports

STARTS_WITHIN_S = 60.0
_POLL_S = 0.05


@dataclass
class Picker:
    """A picker's process; `start` after `end` brings it back on the same ports."""

    configs: list[Path]
    http_port: int
    grpc_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers as a gateway does."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.configs[-1].with_suffix(".log").open("ab") as log:
            command = (*KVGATE, "picker", *(word for file in self.configs for word in ("--config", str(file))))
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def tell(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.tell(number)
        return self.process.wait()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of its series with this name, and with this text in their labels."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        found = (line for line in lines if re.match(rf"{name}[{{ ]", line) and label in line)
        return sum(float(line.split()[-1]) for line in found)


@contextmanager
def running_pickers(
    cluster: Cluster, folder: Path, count: int = 2, settings: dict[str, Any] | None = None, **picker: Any
) -> Iterator[list[Picker]]:
    """Pickers with the configuration of the cluster's first gateway, changed by `settings`. `picker` is their own
    section. Raises DoesNotStart if one is not ready in time."""
    command = cluster.gateway_processes[0].command
    files = [Path(file) for word, file in itertools.pairwise(command) if word == "--config"]
    (folder / "base.yaml").write_text(yaml.safe_dump(settings or {}))
    ports = free_ports(2 * count)
    pickers = [
        Picker([*files, folder / "base.yaml", folder / f"pick{n}.yaml"], ports[2 * n], ports[2 * n + 1])
        for n in range(count)
    ]
    try:
        for number, each in enumerate(pickers):
            own = {"id": f"pick{number}", "port": each.http_port, "picker": {"port": each.grpc_port, **picker}}
            each.configs[-1].write_text(yaml.safe_dump({**own, "shared_port": None}))
            each.start()
        for each in pickers:
            wait_until(partial(is_ready, each.url), each.configs[-1].with_suffix(".log"))
        yield pickers
        STREAMS.read(each.url for each in pickers)
    finally:
        for each in pickers:
            if each.process is not None:
                each.tell(signal.SIGCONT)
                each.end()


def is_ready(url: str, path: str = "/ready", status: int = 200) -> bool:
    """Whether it answers with this status."""
    try:
        return httpx.get(f"{url}{path}", timeout=5, trust_env=False).status_code == status
    except httpx.HTTPError:
        return False


def wait_until(holds: Callable[[], bool], log: Path) -> None:
    """Raises DoesNotStart with the end of this log if it does not hold in time."""
    deadline_s = time.monotonic() + STARTS_WITHIN_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise DoesNotStart(f"not ready after {STARTS_WITHIN_S:g} s; its last words: {log.read_text()[-500:]}")
        select.select([], [], [], _POLL_S)
