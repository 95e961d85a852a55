"""Fetches vLLM's tests, with pytest and the models that they need, into the folder of the installed vLLM.

The tests are only in vLLM's source distribution: some 30 MB to fetch, once. pip uses the package indexes of this
machine's configuration.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.vllm import install as vllm

_WANTED = ("tests", "examples", "pyproject.toml")
"""The tests, the chat templates that they pass to servers, and pytest's configuration."""
_PYTEST = ("pytest==9.*", "pytest-asyncio==1.*", "pytest-timeout==2.*", "tblib==3.*")
_RECIPE = f"1 vllm=={vllm.VERSION} {' '.join(_PYTEST)}"  # raise the number when a step below changes
_REPOSITORY = Path(__file__).resolve().parents[3]


def home() -> Path:
    """The folder in which vLLM's tests run."""
    return vllm.home() / "suite"


def packages() -> Path:
    """A folder for PYTHONPATH, with pytest. It is not in vLLM's environment: that one is a server's, as it is."""
    return home() / "packages"


def models() -> Path:
    """A cache of Hugging Face."""
    return home() / "models"


def install() -> None:
    """Makes what is missing. A second process waits until the first one has made it."""
    vllm.install()
    with vllm.lock(home()):
        if not vllm.is_stamped(home(), _RECIPE):
            print(f"fetching the tests of vLLM {vllm.VERSION} into {home()} (half a minute, once)", flush=True)
            _fetch_tests()
            _run(vllm.pip("install", "--upgrade", "--target", str(packages()), *_PYTEST), dict(os.environ))
            vllm.stamp(home(), _RECIPE)
        here = Path(__file__).parent
        recipe = hashlib.sha256((here / "models.py").read_bytes() + (here / "names.py").read_bytes()).hexdigest()
        if not vllm.is_stamped(models(), recipe):
            shutil.rmtree(models(), ignore_errors=True)
            builder = [str(vllm.python()), "-m", "bench.vllm.suite.models", str(models()), str(home() / "tests")]
            _run(builder, os.environ | {"PYTHONPATH": str(_REPOSITORY)})
            vllm.stamp(models(), recipe)


def _fetch_tests() -> None:
    """pip finds, fetches and unpacks the source distribution. Then it fails, because vLLM's build asks for a compiler's
    tools to tell the package's metadata. With --no-clean it leaves the unpacked files in its temporary folder."""
    with tempfile.TemporaryDirectory(prefix="unpacked-", dir=home()) as folder:
        options = ("--no-clean", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest", folder)
        said = subprocess.run(
            vllm.pip("download", *options, f"vllm=={vllm.VERSION}"),
            env=os.environ | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        source = next((found.parent for found in Path(folder).glob("pip-*/vllm_*/tests")), None)
        if source is None:
            sys.exit(f"cannot fetch the source distribution of vLLM {vllm.VERSION}; pip says\n{said.stderr}")
        for name in _WANTED:
            shutil.rmtree(home() / name, ignore_errors=True)
            (source / name).replace(home() / name)


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stdout}")


if __name__ == "__main__":
    install()
