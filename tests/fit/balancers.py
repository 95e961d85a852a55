"""Load balancers in front of gateways, each with its file of deploy/load-balancers. Only the addresses are others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from bench.processes import running
from gateway.ops.local.ports import free_ports
from tests.fit import install
from tests.polling import wait_until

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "load-balancers"
_STARTS_WITHIN_S = 20
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Balancer:
    """One kind of load balancer."""

    name: str
    files: tuple[str, ...]
    """The first one is given to it."""
    options: Callable[[str], list[str]]
    has_checks: bool = True
    """Whether it asks /ready."""

    @property
    def program(self) -> str | None:
        return install.program(self.name) or shutil.which(self.name) or shutil.which(self.name, path="/usr/sbin")


BALANCERS = (
    Balancer("nginx", ("nginx.conf",), lambda file: ["-c", file, "-g", "daemon off;"], has_checks=False),
    Balancer("haproxy", ("haproxy.cfg",), lambda file: ["-W", "-p", str(Path(file).with_suffix(".pid")), "-f", file]),
    Balancer("caddy", ("Caddyfile",), lambda file: ["run", "--config", file, "--adapter", "caddyfile"]),
    Balancer("envoy", ("envoy.yaml",), lambda file: ["-c", file, "--log-level", "warning", "--use-dynamic-base-id"]),
    Balancer("traefik", ("traefik.yaml", "traefik-routes.yaml"), lambda file: [f"--configFile={file}"]),
)


@contextmanager
def running_balancer(
    balancer: Balancer,
    folder: Path,
    gateways: Sequence[str],
    tls: Mapping[str, str] = NOTHING,
    is_ready: bool = True,
) -> Iterator[str]:
    """Runs one in front of two gateways, and yields its URL when it answers. With `tls`, its file has some lines
    in place of others. Without `is_ready`, it reaches no gateway."""
    assert balancer.program is not None
    port = free_ports(1)[0]
    for name in balancer.files:
        text = (FOLDER / name).read_text()
        for old, new in tls.items():
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        (folder / name).write_text(_adapted(text, folder, port, gateways))
    text = "".join((folder / name).read_text() for name in balancer.files)
    assert str(port) in text
    assert "10.0.0." not in text
    command = [balancer.program, *balancer.options(str(folder / balancer.files[0]))]
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    with (folder / f"{balancer.name}.log").open("wb") as log, running(command, log):
        wait_until(lambda: _answers(url) is is_ready, within_s=_STARTS_WITHIN_S)
        yield url


def _adapted(text: str, folder: Path, port: int, gateways: Sequence[str]) -> str:
    text = text.replace("8000", str(port)).replace("/tmp/kvgate-nginx.pid", str(folder / "nginx.pid"))
    text = text.replace("filename: traefik-routes.yaml", f"filename: {folder / 'traefik-routes.yaml'}")
    for host, url in zip(("10.0.0.5", "10.0.0.6"), gateways, strict=True):
        address = urlsplit(url)
        text = text.replace(f"{host}:8080", f"{address.hostname}:{address.port}")
        text = text.replace(f"{host}, port_value: 8080", f"{address.hostname}, port_value: {address.port}")
    return text


def _answers(url: str) -> bool | None:
    """Whether a gateway answers there; None if nothing does."""
    try:
        return httpx.get(f"{url}/ready", timeout=2, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return None
