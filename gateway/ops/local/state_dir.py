"""The files of a local cluster in its state directory.

    cluster.json    the addresses of all members, for programs: written when all can serve, removed when they stop
    processes.json  every process with its start time and log, for `kvgate down` and `status`
    <id>.yaml       each gateway's configuration
    logs/<id>.log   each process' output
    records_secret  what its gateways sign API keys with, unless they are given another: it stays when they stop
    redis/          the embedded Redis' working directory
    lock            held while any of the processes runs

URLs and configurations may hold a password, so only the owner may read the files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.ops.errors import CommandError
from gateway.ops.local.processes import Process


@dataclass(frozen=True)
class ClusterProcess:
    """A gateway or replica. `pid` is None for a server that this cluster did not start."""

    id: str
    url: str
    pid: int | None


@dataclass(frozen=True)
class Cluster:
    """The content of cluster.json. `url` is the address that all gateways share."""

    url: str
    redis_url: str
    gateways: list[ClusterProcess]
    replicas: list[ClusterProcess]
    redis_namespace: str = ""
    base_config: str = ""
    """The file that each gateway reads before its own; empty for none."""


def agent_id(replica: str) -> str:
    """The name of the agent process of `replica`."""
    return f"agent-{replica}"


def write_cluster(state_dir: Path, cluster: Cluster) -> None:
    write_private(state_dir / "cluster.json", json.dumps(asdict(cluster), indent=2) + "\n")


def read_cluster(state_dir: Path) -> Cluster:
    """Raises CommandError if no cluster is up."""
    found = _read_json(state_dir / "cluster.json")
    if found is None:
        raise CommandError(f"no cluster is up in {state_dir}: start one with `kvgate up --state-dir {state_dir}`")
    return msgspec.convert(found, Cluster)


def write_processes(state_dir: Path, processes: list[Process]) -> None:
    rows = [{**asdict(process), "log": str(process.log)} for process in processes]
    write_private(state_dir / "processes.json", json.dumps(rows, indent=2) + "\n")


def read_processes(state_dir: Path) -> list[Process]:
    """The processes of the cluster in `state_dir`, alive or not; empty if there is none."""
    rows = _read_json(state_dir / "processes.json") or []
    return [Process(**{**row, "log": Path(row["log"])}) for row in rows]


def forget_cluster(state_dir: Path) -> None:
    """Say that no cluster is up. The logs and the gateways' configurations stay until the next cluster starts."""
    for name in ("cluster.json", "processes.json"):
        (state_dir / name).unlink(missing_ok=True)


def remove_old_files(state_dir: Path) -> None:
    """Remove what the last cluster left, which may have had more processes. Other files in the folders stay."""
    forget_cluster(state_dir)
    for path in (*state_dir.iterdir(), *(state_dir / "logs").iterdir()):
        if re.fullmatch(r"gw\d+\.yaml|(gw\d+|r\d+|agent-.+|redis)\.log", path.name):
            path.unlink()


def records_secret(state_dir: Path) -> str:
    """The secret of this folder's clusters, made once."""
    path = state_dir / "records_secret"
    if not path.exists():
        write_private(path, secrets.token_hex(32) + "\n")
    return path.read_text(encoding="utf-8").strip()


def write_private(path: Path, text: str) -> None:
    """Replace `path` in one step: a reader sees the old text or the new one. Only the owner may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read ({error}): remove it") from None
