"""Installs the client libraries that tests/clients drives: `python -m tests.clients.install`.

They live in a cache folder outside the repository: two virtual environments, because the libraries do not agree on one
version of openai, and a Node project. Node itself comes as a wheel. The download is about 300 MB and takes 0.8 GB on
disk and two minutes, once. A folder is rebuilt when the file that lists its libraries changes. pip and npm use the
machine's configured registries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench.vllm import install as vllm

_LISTS = Path(__file__).parent
_ENVIRONMENTS = {"requirements.txt": "python", "requirements-older.txt": "python-older"}
_PROJECT = "package.json"


def home() -> Path:
    """The folder of all installed libraries, beside vLLM's folder."""
    return vllm.home().with_name("clients")


def python(requirements: str) -> Path:
    """The interpreter that can import the libraries in this list."""
    return home() / _ENVIRONMENTS[requirements] / "bin" / "python"


def node() -> Path:
    return python("requirements.txt").with_name("node")


def project() -> Path:
    """The folder in which Node finds the libraries of package.json."""
    return home() / "node"


def install() -> None:
    """Install what is missing. A second process waits for the first to finish."""
    with vllm.lock(home()):
        missing = [name for name in _ENVIRONMENTS if not (_is_made(name) and python(name).exists())]
        if not missing and _is_made(_PROJECT):
            return
        print(f"installing client libraries and Node into {home()} (0.8 GB, two minutes, once)", flush=True)
        for name in missing:
            _make_environment(name)
        _make_project()  # a new Node needs a new project too


def _folder(name: str) -> Path:
    return home() / _ENVIRONMENTS[name] if name in _ENVIRONMENTS else project()


def _recipe(name: str) -> str:
    return (_LISTS / name).read_text()


def _is_made(name: str) -> bool:
    return vllm.is_stamped(_folder(name), _recipe(name))


def _make_environment(requirements: str) -> None:
    folder = _folder(requirements)
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    options = ["--quiet", "--disable-pip-version-check", "--requirement", str(_LISTS / requirements)]
    _run([str(python(requirements)), "-m", "pip", "install", *options], requirements)
    vllm.stamp(folder, _recipe(requirements))


def _make_project() -> None:
    shutil.rmtree(project(), ignore_errors=True)
    project().mkdir(parents=True)
    shutil.copy(_LISTS / _PROJECT, project())
    options = ["--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(project())]
    _run([str(node().with_name("npm")), "install", *options], _PROJECT)
    vllm.stamp(project(), _recipe(_PROJECT))


def _run(command: list[str], name: str) -> None:
    # npm runs on the Node beside it, and looks for it on the PATH.
    path = os.pathsep.join((str(Path(command[0]).parent), os.environ["PATH"]))
    if subprocess.run(command, env=os.environ | {"PATH": path}, check=False).returncode != 0:
        sys.exit(f"cannot install what tests/clients/{name} lists: the reason is above")


if __name__ == "__main__":
    install()
