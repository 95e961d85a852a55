"""What the local cluster leaves in its state directory while it runs.

    cluster.json    where everything is, for programs: written once all of it can serve, removed when it stops
    processes.json  every process with its start time and log, for `kvgate down` and `status`
    <id>.yaml       each gateway's configuration
    logs/<id>.log   each process' output
    redis/          the embedded Redis' working directory
    lock            held while any of the processes lives

URLs and configurations may hold a password, so the files are readable by their owner alone.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.ops.local.errors import ClusterError
from gateway.ops.local.processes import Process


@dataclass(frozen=True)
class ClusterProcess:
    """A gateway or replica; `pid` is the process that serves, or None for a server that was there before."""

    id: str
    url: str
    pid: int | None


@dataclass(frozen=True)
class Cluster:
    """What cluster.json holds. `url` is the address that all gateways share."""

    url: str
    redis_url: str
    gateways: list[ClusterProcess]
    replicas: list[ClusterProcess]
    redis_namespace: str = ""


def agent_id(replica: str) -> str:
    """The id of the process that follows `replica`."""
    return f"agent-{replica}"


def write_cluster(state_dir: Path, cluster: Cluster) -> None:
    write_private(state_dir / "cluster.json", json.dumps(asdict(cluster), indent=2) + "\n")


def read_cluster(state_dir: Path) -> Cluster:
    """Raises ClusterError where no cluster is up."""
    found = _read_json(state_dir / "cluster.json")
    if found is None:
        raise ClusterError(f"no cluster is up in {state_dir}: start one with `kvgate up --state-dir {state_dir}`")
    members = {kind: [ClusterProcess(**member) for member in found[kind]] for kind in ("gateways", "replicas")}
    return Cluster(found["url"], found["redis_url"], **members, redis_namespace=found.get("redis_namespace", ""))


def write_processes(state_dir: Path, processes: list[Process]) -> None:
    rows = [{**asdict(process), "log": str(process.log)} for process in processes]
    write_private(state_dir / "processes.json", json.dumps(rows, indent=2) + "\n")


def read_processes(state_dir: Path) -> list[Process]:
    """The processes started last in `state_dir`, alive or not; empty where none was."""
    rows = _read_json(state_dir / "processes.json") or []
    return [Process(**{**row, "log": Path(row["log"])}) for row in rows]


def clear(state_dir: Path) -> None:
    """Forget the cluster; its logs stay."""
    for name in ("cluster.json", "processes.json"):
        (state_dir / name).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Replace `path` in one step, so that a reader sees the old text or the new, and only its owner may read."""
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
        raise ClusterError(f"{path} cannot be read ({error}): remove it") from None
