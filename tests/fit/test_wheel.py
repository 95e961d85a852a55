"""The wheel is enough: in an environment with nothing else, far from a checkout, `kvgate up` answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import httpx
import pytest

from gateway.ops.local.ports import free_ports
from tests.api.stage import chat_body
from tests.documents import example, typing

pytestmark = pytest.mark.fit
ROOT = Path(__file__).resolve().parents[2]
BUILT = ("gateway", "coordinator", "pyproject.toml", "README.md", "LICENSE")


def run(folder: Path, *command: str | Path) -> str:
    # Nothing of this checkout, and no program of its environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a wheel is built from."""
    source = tmp_path / "source"
    source.mkdir()
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    return source


def test_a_cluster_runs_from_the_wheel_alone(source: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    *building, up, down = example("try-it.md", "From a wheel", {"8080": str(port), "~": str(tmp_path)})
    with typing(source, building, within_s=300):
        (wheel,) = (source / "dist").glob("kvgate-*.whl")
    files = {name.split(".dist-info/")[-1] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"licenses/LICENSE", "gateway/py.typed", "coordinator/py.typed"} <= files
    empty, home = tmp_path / "empty", tmp_path / "kvgate-env"
    empty.mkdir()
    assert run(empty, home / "bin" / "kvgate", "--version").split()[-1] == wheel.name.split("-")[1]
    where = run(empty, home / "bin" / "python", "-c", "import gateway, coordinator; print(gateway.__file__)")
    assert where.startswith(str(home))
    with typing(empty, [up], [down]):
        url = f"http://127.0.0.1:{port}"
        for reason in ("cold", "hit"):
            body = chat_body("the same words " * 100)
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20, trust_env=False)
            assert answer.status_code == 200
            assert answer.headers["x-kvgate-decision"].startswith(reason)
        assert httpx.get(f"{url}/console", timeout=20, trust_env=False).status_code == 200
        assert "2 gateways, 2 replicas" in run(empty, home / "bin" / "kvgate", "doctor")
    assert {file.name for file in empty.iterdir()} <= {".kvgate", "printed.txt"}
