"""Starts each proxy in front of the canned servers, and names the processes whose cost is counted."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import envoy
from bench.cluster import KVGATE, Cluster, running_gateways
from bench.envoy import NOTHING, PASSES, running_envoy, running_envoy_alone
from bench.overhead.canned import MODEL
from bench.peers import PEERS, Peer, running_peer, running_process
from bench.pickers import running_pickers
from gateway.ops.local.ports import free_ports
from gateway.ops.local.state_dir import read_processes


@dataclass(frozen=True)
class Running:
    """A proxy that answers."""

    urls: list[str]
    pids: list[int]
    """The roots of its process trees. Empty if there is no proxy."""
    version: str
    store_pids: list[int] = field(default_factory=list)
    """Redis, if there is one. Its cost is shown beside the proxy's."""
    picker_pids: list[int] = field(default_factory=list)
    """Those of `pids` that are pickers. Their part of the proxy's cost is shown, too."""
    kvgate_urls: list[str] = field(default_factory=list)
    """Gateways and pickers: they tell how long placements take."""


@dataclass(frozen=True)
class Contender:
    """A proxy that can be measured. `missing` says how to install it, and is empty if it is installed."""

    name: str
    start: Callable[[Sequence[str]], AbstractContextManager[Running]]
    missing: Callable[[], str] = lambda: ""


def _direct(upstreams: Sequence[str]) -> AbstractContextManager[Running]:
    return nullcontext(Running(list(upstreams), [], ""))


def _kvgate(
    gateways: int, command: Sequence[str] = KVGATE, config: dict[str, Any] | None = None
) -> Callable[[Sequence[str]], AbstractContextManager[Running]]:
    @contextmanager
    def start(upstreams: Sequence[str]) -> Iterator[Running]:
        urls = {f"r{index}": url for index, url in enumerate(upstreams)}
        with running_gateways(urls, gateways=gateways, kvgate=command, config=config) as cluster:
            processes = read_processes(cluster.state_dir)
            yield Running(
                cluster.gateway_urls,
                [process.pid for process in processes if process.kind == "gateway"],
                metadata.version("kvgate"),
                _redis_pids(cluster),
                kvgate_urls=cluster.gateway_urls,
            )

    return start


def _redis_pids(cluster: Cluster) -> list[int]:
    return [process.pid for process in read_processes(cluster.state_dir) if process.kind == "redis"]


@contextmanager
def _envoy(upstreams: Sequence[str]) -> Iterator[Running]:
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
        running_envoy_alone(upstreams, Path(folder)) as alone,
    ):
        yield Running([alone.url], [alone.pid], envoy.version())


def _envoy_with_picker(changes: Mapping[str, str]) -> Callable[[Sequence[str]], AbstractContextManager[Running]]:
    @contextmanager
    def start(upstreams: Sequence[str]) -> Iterator[Running]:
        urls = {f"r{index}": url for index, url in enumerate(upstreams)}
        with (
            tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
            running_gateways(urls, gateways=1) as cluster,
            running_pickers(cluster, Path(folder), 1) as (picker,),
            running_envoy([picker], Path(folder), changes) as asking,
        ):
            cluster.gateway_processes[0].stop()  # only its file was needed
            yield Running(
                [asking.url],
                [asking.pid, picker.pid],
                envoy.version(),
                _redis_pids(cluster),
                [picker.pid],
                [picker.url],
            )

    return start


BESIDE = "kvgate beside"
"""The name of the other KVGate that this one is compared with."""
PARTS: Mapping[str, dict[str, Any]] = {"resume": {"resume": {"enabled": False}}, "hedge": {"hedge": {"max_share": 0}}}
"""What can be switched off to see its cost, and the configuration that does it."""


def of_checkout(checkout: Path) -> Contender:
    """The gateways of another checkout of KVGate with the packages of its .venv, for example the code before a
    change."""
    command = checkout / ".venv" / "bin" / "kvgate"
    missing = "" if command.exists() else f"run `make install` in {checkout}"
    return Contender(BESIDE, _kvgate(1, [str(command)]), lambda: missing)


def without(part: str) -> Contender:
    """The same gateways with one of PARTS switched off."""
    return Contender(BESIDE, _kvgate(1, config=PARTS[part]))


def _of_peer(peer: Peer) -> Contender:
    @contextmanager
    def start(upstreams: Sequence[str]) -> Iterator[Running]:
        with running_peer(peer, upstreams, MODEL) as (url, pid):
            yield Running([url], [pid], peer.version)

    return Contender(peer.name, start, lambda: "" if peer.is_installed else "run once with --install")


_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 64m; client_body_buffer_size 4m; keepalive_requests 1000000000;
  upstream replicas {{ {servers} keepalive 512; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@contextmanager
def _nginx(upstreams: Sequence[str]) -> Iterator[Running]:
    (port,) = free_ports(1)
    version = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr.split("/")[-1].strip()
    with tempfile.TemporaryDirectory() as folder:
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in upstreams)
        config = Path(folder) / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, servers=servers, port=port))
        command = ["nginx", "-c", str(config), "-e", f"{folder}/error.log"]
        with running_process(command, port, "/health", MODEL) as pid:
            yield Running([f"http://127.0.0.1:{port}"], [pid], version)


CONTENDERS = {
    each.name: each
    for each in (
        Contender("direct", _direct),
        Contender("nginx", _nginx, lambda: "" if shutil.which("nginx") else "apt install nginx-light"),
        Contender("kvgate", _kvgate(1)),
        Contender("kvgate x2", _kvgate(2)),
        Contender("envoy", _envoy, envoy.missing),
        Contender("envoy + picker", _envoy_with_picker(NOTHING), envoy.missing),
        Contender("envoy + picker (answers pass)", _envoy_with_picker(PASSES), envoy.missing),
        *(_of_peer(peer) for peer in PEERS.values()),
    )
}
