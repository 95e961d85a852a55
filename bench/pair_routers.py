"""Other programs that let one replica compute a prompt and another one decode, over NIXL, as their users run them.

`python -m bench.disaggregation --install` installs the routers from PyPI. vLLM's proxy is one file of its repository,
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py; `--proxy FILE` names it, and this Python runs it. It takes
turns. smg is told of its replicas after its start: if the command names them, it sends no `kv_transfer_params`, and
decode computes each prompt again.

sglang-router 0.3.2 is none of them. With --pd-disaggregation it speaks SGLang's protocol: both replicas get the request
at once, without `kv_transfer_params`, and both compute the prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from bench.peers import PEERS, Peer

_PROXY = "toy-proxy"
_ROUTERS = ("vllm-router", "smg")
NAMES = (_PROXY, *_ROUTERS)
_CONNECTS = 5
"""Attempts to reach a router that starts, with growing pauses."""

Command = Callable[[Path, int, int, Sequence[str], str, Path], list[str]]


def pair_router(name: str, prefills: int, proxy: Path | None = None) -> Peer:
    """A router before replicas of which the first ones compute prompts, and the others decode."""
    if name == _PROXY:
        return Peer(name, "", _proxy(prefills, proxy or Path()), "/healthcheck")
    if name == "smg":
        return Peer(name, "smg==1.13.0", _smg, "/health", lambda url, upstreams: _register(url, upstreams, prefills))
    return Peer(name, PEERS[name].requirement, _vllm_router(prefills))


def versions() -> dict[str, str]:
    return {name: pair_router(name, 1).version for name in _ROUTERS}


def install() -> None:
    """Raises CalledProcessError if pip fails."""
    for name in _ROUTERS:
        pair_router(name, 1).install()


def missing(name: str, proxy: Path | None) -> str:
    """Why it cannot run. Empty if it can."""
    if name == _PROXY:
        return "" if proxy else "--proxy names vLLM's file"
    return "" if pair_router(name, 1).is_installed else "python -m bench.disaggregation --install installs it"


def _proxy(prefills: int, file: Path) -> Command:
    def command(_bin: Path, port: int, _metrics: int, upstreams: Sequence[str], _model: str, _at: Path) -> list[str]:
        asked = [sys.executable, str(file), "--port", str(port)]
        for role, urls in (("prefiller", upstreams[:prefills]), ("decoder", upstreams[prefills:])):
            asked += [f"--{role}-hosts", *(urlsplit(url).hostname or "" for url in urls)]
            asked += [f"--{role}-ports", *(str(urlsplit(url).port) for url in urls)]
        return asked

    return command


def _vllm_router(prefills: int) -> Command:
    def command(bin_: Path, port: int, metrics: int, upstreams: Sequence[str], _model: str, _at: Path) -> list[str]:
        asked = [str(bin_ / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
        asked += ["--prometheus-port", str(metrics), "--log-level", "error"]
        asked += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for number, url in enumerate(upstreams):
            asked += ["--prefill" if number < prefills else "--decode", url]
        return asked

    return command


def _smg(bin_: Path, port: int, metrics: int, _upstreams: Sequence[str], _model: str, _at: Path) -> list[str]:
    asked = [str(bin_ / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    asked += ["--prometheus-port", str(metrics), "--log-level", "error"]
    return [*asked, "--backend", "vllm", "--pd-disaggregation"]


def _register(url: str, upstreams: Sequence[str], prefills: int) -> None:
    with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=_CONNECTS)) as http:
        for number, upstream in enumerate(upstreams):
            role = "prefill" if number < prefills else "decode"
            told = {"url": upstream, "worker_type": role, "runtime_type": "vllm", "kv_connector": "NixlConnector"}
            http.post("/workers", json=told).raise_for_status()
