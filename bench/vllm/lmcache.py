"""Installs LMCache for the vLLM of `install`: `python -m bench.vllm.lmcache`.

It has its own folder, which PYTHONPATH puts beside vLLM's packages: 130 MB. So the environment in which other tests run
vLLM does not change. LMCache's wheel requires CUDA's libraries and older versions of vLLM's packages. On CPUs it works
without these, so each package is installed without its dependencies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.vllm import install

VERSION = "0.5.6"
_REQUIREMENTS = (
    f"lmcache=={VERSION}",
    "valkey-glide-sync==2.6.0",
    "aiofile==3.12.3",
    "caio==0.12.10",
    "aiofiles==25.1.0",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
    "redis==8.1.0",
    "sortedcontainers==2.4.0",
)
_RECIPE = f"1 {install.VERSION} {' '.join(_REQUIREMENTS)}"


def folder() -> Path:
    return install.home() / f"lmcache-{VERSION}"


def program() -> Path:
    """`lmcache`. It runs with `environment`."""
    return folder() / "bin" / "lmcache"


def environment() -> dict[str, str]:
    """The variables with which a process of vLLM or LMCache finds LMCache."""
    return {"PYTHONPATH": str(folder()), "LMCACHE_TRACK_USAGE": "false"}


def install_lmcache(size: str = install.TINY) -> None:
    """Installs vLLM, a model and LMCache if they are missing."""
    install.install(size)
    with install.lock(install.home()):
        if install.is_stamped(folder(), _RECIPE):
            return
        print(f"installing LMCache {VERSION} into {folder()} (half a minute, once)", flush=True)
        shutil.rmtree(folder(), ignore_errors=True)
        done = subprocess.run(
            install.pip("install", "--no-deps", "--target", str(folder()), *_REQUIREMENTS), check=False
        )
        if done.returncode != 0:
            sys.exit(f"cannot install {' '.join(_REQUIREMENTS)}: this machine's package index needs all of them")
        install.stamp(folder(), _RECIPE)


if __name__ == "__main__":
    install_lmcache()
