"""The wheel is enough: in an environment with nothing else, far from a checkout, `kvgate up` answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import httpx
import pytest

from gateway.ops.local.ports import free_ports
from tests.api.stage import chat_body
from tests.fit import install

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    python = install.home() / "bin" / "python"
    run(source, python, "-m", "build", "--wheel", "--outdir", source / "dist")
    (found,) = (source / "dist").glob("kvgate-*.whl")
    return found


def test_a_cluster_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    home, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    venv.EnvBuilder(with_pip=True, symlinks=True).create(home)
    kvgate, port = home / "bin" / "kvgate", free_ports(1)[0]
    run(folder, home / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[local]")
    assert run(folder, kvgate, "--version").split()[-1] == wheel.name.split("-")[1]
    where = run(folder, home / "bin" / "python", "-c", "import gateway, coordinator; print(gateway.__file__)")
    assert where.startswith(str(home))
    run(folder, kvgate, "up", "--port", str(port), "--detach")
    try:
        url = f"http://127.0.0.1:{port}"
        for reason in ("cold", "hit"):
            body = chat_body("the same words " * 100)
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20, trust_env=False)
            assert answer.status_code == 200
            assert answer.headers["x-kvgate-decision"].startswith(reason)
        assert httpx.get(f"{url}/console", timeout=20, trust_env=False).status_code == 200
        assert "2 gateways, 2 replicas" in run(folder, kvgate, "doctor")
    finally:
        run(folder, kvgate, "down")
    assert list(folder.iterdir()) in ([], [folder / ".kvgate"])
