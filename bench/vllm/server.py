"""A server of a replica as a process group on this machine: vLLM's, or LMCache's beside it.

vLLM is two processes, the API server and its engine. They are killed together, because the engine would outlive its
server and keep the ports.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.vllm import install
from gateway.ops.local.processes import tail

_START_TIMEOUT_S = 180.0
_POLL_S = 0.1
_DIES_WITHIN_S = 20.0
# In production an engine computes on a GPU and leaves the processors to agents and gateways. So here it runs with low
# priority.
_GIVING_WAY = ("nice", "-n", "10")


@dataclass
class Server(ABC):
    """`start` after `kill` brings it back on the same ports."""

    id: str
    port: int
    """The HTTP port."""
    log: Path
    health_path: str = field(default="/health", kw_only=True)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def command(self) -> list[str]:
        """The command that starts it."""

    def environment(self) -> dict[str, str]:
        """Its complete environment."""
        return environment(self.log.parent)

    def start(self) -> None:
        """Starts it. `wait_until_healthy` tells when it serves. It dies with the thread that calls this."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*die_with_this_process(), *_GIVING_WAY, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,  # in its own process group, so that `kill` ends the engine as well
            )

    def wait_until_healthy(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Returns once it serves. Raises RuntimeError with the end of its log if it exits or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            if self._has_exited_within(_POLL_S) or time.monotonic() > deadline:
                raise RuntimeError(f"{self.id} does not serve; its log ends with\n{tail(self.log, 30)}")

    def is_healthy(self) -> bool:
        try:
            return httpx.get(self.url + self.health_path, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """Sends SIGKILL to all its processes. Returns when they are gone."""
        if self.process is None:
            return
        group = self.process.pid
        deadline = time.monotonic() + _DIES_WITHIN_S
        while _has_members(group):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._has_exited_within(_POLL_S)  # this also reaps it
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.id} outlives SIGKILL: process group {group}")
        self.process.wait()
        self.process = None

    def _has_exited_within(self, timeout_s: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def environment(folder: Path) -> dict[str, str]:
    """This process' environment without variables that would configure vLLM or Python differently."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(install.home() / "cache"),
        "VLLM_CONFIG_ROOT": str(install.home() / "config"),
        "VLLM_RPC_BASE_PATH": str(folder),  # puts its sockets where they are removed afterwards
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, more than `blocks` need
        # One thread per replica on any free core: two replicas and the gateways share two cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_SIM_MULTI_NUMA": "1",  # data-parallel ranks share one NUMA node
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONHASHSEED": "0",  # all replicas give equal blocks equal hashes
    }


@functools.cache
def die_with_this_process() -> tuple[str, ...]:
    """A command prefix: it makes the command and all its children die with this process, however this process ends.

    `bound` kills its command. The command is the first process in a PID namespace, so its children die with it. If the
    kernel refuses namespaces (as in most containers), the engine stays after a test run that SIGKILL ended.
    """
    bound = (sys.executable, "-P", "-m", "gateway.ops.local.bound_process", str(os.getpid()))
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if shutil.which(namespace[0]) is None:
        return bound
    permitted = subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0
    return (*bound, *namespace) if permitted else bound


def _has_members(group: int) -> bool:
    """Whether a process of this group still runs. A process that has exited and was not reaped does not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group_of_it, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group_of_it) == group and state not in "ZX":
            return True
    return False
