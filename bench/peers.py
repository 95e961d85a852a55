"""Other routers as their users run them. Each is installed from PyPI into its own virtual environment.

A run leaves out routers that are not installed, and says so. `python -m bench.overhead --install` installs all of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from bench.processes import running
from gateway.ops.local.ports import free_ports

FOLDER = Path.home() / ".cache" / "kvgate" / "peers"
_INSTALLED = "installed"
"""A file that is written after pip has finished. It names the installed version."""
_READY_S = 60.0
_POLL_S = 0.2


class DoesNotStart(Exception):
    """An installed proxy does not serve."""


@dataclass(frozen=True)
class Peer:
    """A router. `command` makes its command line from a port, a second port for metrics, the upstreams and the
    model."""

    name: str
    requirement: str
    command: Callable[[Path, int, int, Sequence[str], str, Path], list[str]]
    probe: str = "/health"
    register: Callable[[str, Sequence[str]], None] = lambda _url, _upstreams: None
    """Tells the router at this URL of the upstreams, if its command does not."""

    @property
    def folder(self) -> Path:
        return FOLDER / self.requirement.partition("==")[0].partition("[")[0]

    @property
    def is_installed(self) -> bool:
        stamp = self.folder / _INSTALLED
        return stamp.exists() and stamp.read_text() == self.requirement

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2]

    def install(self) -> None:
        """Raises CalledProcessError if pip fails."""
        if not (self.folder / "bin").exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        (self.folder / _INSTALLED).unlink(missing_ok=True)
        pip = [str(self.folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, self.requirement], check=True)
        (self.folder / _INSTALLED).write_text(self.requirement)


def _vllm_router(bin_: Path, port: int, metrics: int, upstreams: Sequence[str], _model: str, _at: Path) -> list[str]:
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    options += ["--policy", "cache_aware", "--log-level", "error"]
    return [str(bin_ / "vllm-router"), *options, "--worker-urls", *upstreams]


def _sglang_router(bin_: Path, port: int, metrics: int, upstreams: Sequence[str], _model: str, _at: Path) -> list[str]:
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    options += ["--policy", "cache_aware", "--log-level", "error"]
    return [str(bin_ / "python"), "-m", "sglang_router.launch_router", *options, "--worker-urls", *upstreams]


def _litellm(bin_: Path, port: int, _metrics: int, upstreams: Sequence[str], model: str, folder: Path) -> list[str]:
    models = [
        {
            "model_name": model,
            "litellm_params": {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in upstreams
    ]
    config = folder / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": models}))
    environment = ["LITELLM_LOG=ERROR", "LITELLM_LOCAL_MODEL_COST_MAP=True"]
    environment += ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true"]  # no keys, like the others
    options = ["--host", "127.0.0.1", "--port", str(port), "--config", str(config), "--num_workers", "1"]
    return ["env", *environment, str(bin_ / "litellm"), *options]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("sglang-router", "sglang-router==0.3.2", _sglang_router),
        Peer("vllm-router", "vllm-router==0.1.17", _vllm_router),
        Peer("litellm", "litellm[proxy]==1.106.2", _litellm, "/health/liveliness"),
    )
}


@contextmanager
def running_peer(peer: Peer, upstreams: Sequence[str], model: str) -> Iterator[tuple[str, int]]:
    """Yields its URL and its pid. Raises DoesNotStart."""
    port, metrics = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="kvgate-peer-") as folder:
        command = peer.command(peer.folder / "bin", port, metrics, upstreams, model, Path(folder))
        url = f"http://127.0.0.1:{port}"
        with running_process(command, port, peer.probe, model, lambda: peer.register(url, upstreams)) as pid:
            yield url, pid


@contextmanager
def running_process(
    command: Sequence[str], port: int, probe: str, model: str, started: Callable[[], None] = lambda: None
) -> Iterator[int]:
    """Runs a proxy on `port`. Yields its pid after it has answered a request. Raises DoesNotStart."""
    with tempfile.TemporaryFile() as log, ExitStack() as stack:
        try:
            process = stack.enter_context(running(command, log))
        except OSError as error:
            raise DoesNotStart(str(error)) from error
        try:
            started()
            _wait_until_it_answers(process, f"http://127.0.0.1:{port}", probe, model)
        except (RuntimeError, httpx.HTTPError) as error:
            log.seek(0)
            raise DoesNotStart(f"{error}; its last words: {log.read().decode()[-500:]}") from error
        yield process.pid


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, probe: str, model: str) -> None:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
    deadline = time.monotonic() + _READY_S
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            httpx.get(url + probe, timeout=5).raise_for_status()
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=5).raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)  # noqa: TID251 -- the proxy does not announce when it is ready
        else:
            return
