"""Envoy as a process: with the file of deploy/load-balancers that asks pickers, or with the same file without them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from bench.pickers import Picker, is_ready, wait_until
from bench.processes import running
from bench.vllm import install as vllm
from gateway.ops.local.ports import free_ports

FIT = vllm.home().with_name("fit")
"""The folder of what `make test-fit` installs."""
INSTALL = "make test-fit installs it (or put one on PATH: .ci/run shows how)"
PASSES = {
    "response_body_mode: FULL_DUPLEX_STREAMED": "response_body_mode: NONE",
    "response_trailer_mode: SEND": "response_trailer_mode: SKIP",
}
"""What to write in Envoy's file so that answers pass without the picker."""
NOTHING: Mapping[str, str] = {}
_PATH = "/v1/models"
"""An Envoy that answers on it has a picker and a replica."""
_FILE = Path(__file__).resolve().parents[1] / "deploy" / "load-balancers" / "envoy-picker.yaml"


def program() -> str | None:
    """Where Envoy is; None if it is not installed."""
    installed = next(FIT.glob("lib/python*/site-packages/envoy/_bin/envoy"), None)
    return str(installed) if installed else shutil.which("envoy")


def missing() -> str:
    """How to install it; empty if it is installed."""
    return "" if program() else INSTALL


def version() -> str:
    """Its version. It says `envoy  version: COMMIT/1.39.3/Clean/RELEASE/BoringSSL`."""
    said = subprocess.run([program() or "", "--version"], capture_output=True, text=True, check=True).stdout
    return said.split("version: ")[1].split("/")[1]


@dataclass(frozen=True)
class Envoy:
    """One that answers."""

    url: str
    pid: int


@contextmanager
def running_envoy(
    pickers: Sequence[Picker],
    folder: Path,
    changes: Mapping[str, str] = NOTHING,
    status: int = 200,
    path: str = _PATH,
    edit: Callable[[list[Any], list[Any]], None] | None = None,
) -> Iterator[Envoy]:
    """Envoy, which asks these pickers. Yields when it answers on `path` with this status. Its file has some texts in
    place of others; `edit` may change its filters and its clusters. Raises DoesNotStart."""
    text = _FILE.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    document = yaml.safe_load(text)
    resources = document["static_resources"]
    if edit is not None:
        edit(resources["listeners"][0]["filter_chains"][0]["filters"], resources["clusters"])
    asked = next(each for each in resources["clusters"] if each["name"] == "pickers")
    asked["load_assignment"] = _endpoints("pickers", [each.grpc_port for each in pickers])
    with _running(document, folder, path, status) as envoy:
        yield envoy


@contextmanager
def running_envoy_alone(urls: Sequence[str], folder: Path) -> Iterator[Envoy]:
    """Envoy with the same file, but nobody to ask: these servers take turns. Raises DoesNotStart."""
    document = yaml.safe_load(_FILE.read_text())
    resources = document["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [each for each in manager["http_filters"] if each["name"].endswith(".router")]
    (replicas,) = (each for each in resources["clusters"] if each["name"] == "replicas")
    del replicas["original_dst_lb_config"]
    replicas |= {"type": "STATIC", "lb_policy": "ROUND_ROBIN"}
    replicas["load_assignment"] = _endpoints("replicas", [urlsplit(url).port for url in urls])
    resources["clusters"] = [replicas]
    with _running(document, folder, _PATH, 200) as envoy:
        yield envoy


def _endpoints(cluster: str, ports: Sequence[int | None]) -> dict[str, Any]:
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in ports]
    return {
        "cluster_name": cluster,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}],
    }


@contextmanager
def _running(document: dict[str, Any], folder: Path, path: str, status: int) -> Iterator[Envoy]:
    """With one thread for requests, like nginx and each gateway here."""
    command, (port,) = program(), free_ports(1)
    assert command is not None
    document["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = port
    file = folder / f"envoy-{port}.yaml"
    file.write_text(yaml.safe_dump(document))
    options = ["-c", str(file), "--log-level", "warning", "--use-dynamic-base-id", "--concurrency", "1"]
    log, url = file.with_suffix(".log"), f"http://127.0.0.1:{port}"
    with log.open("wb") as output, running([command, *options], output) as process:
        wait_until(partial(is_ready, url, path, status), log)
        yield Envoy(url, process.pid)
