"""Pickers that run as processes, and an Envoy with the file of deploy/load-balancers. Only addresses are others."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import redis
import yaml

from bench.cluster import KVGATE, Cluster, SimReplica
from bench.processes import running
from gateway.ops.local.ports import free_ports
from tests.api.stage import chat_body, fresh
from tests.polling import wait_until
from tests.programs import ENVOY

CHAT = "/v1/chat/completions"
PASSES = {
    "response_body_mode: FULL_DUPLEX_STREAMED": "response_body_mode: NONE",
    "response_trailer_mode: SEND": "response_trailer_mode: SKIP",
}
"""What to write in Envoy's file so that answers pass without the picker."""
_FILE = Path(__file__).resolve().parents[2] / "deploy" / "load-balancers" / "envoy-picker.yaml"
_STARTS_WITHIN_S = 30
NOTHING: Mapping[str, str] = {}


@dataclass
class Picker:
    """A picker's process; `start` after `kill` brings it back on the same ports."""

    configs: list[Path]
    http_port: int
    grpc_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers as a gateway does."""
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        with self.configs[-1].with_suffix(".log").open("ab") as log:
            command = (*KVGATE, "picker", *(word for file in self.configs for word in ("--config", str(file))))
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def tell(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.tell(number)
        return self.process.wait()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of its series with this name, and with this text in their labels."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        found = (line for line in lines if re.match(rf"{name}[{{ ]", line) and label in line)
        return sum(float(line.split()[-1]) for line in found)


@contextmanager
def running_pickers(
    cluster: Cluster, folder: Path, count: int = 2, settings: dict[str, Any] | None = None, **picker: Any
) -> Iterator[list[Picker]]:
    """Pickers with the configuration of the cluster's first gateway, changed by `settings`. `picker` is their own
    section."""
    command = cluster.gateway_processes[0].command
    files = [Path(file) for word, file in itertools.pairwise(command) if word == "--config"]
    (folder / "base.yaml").write_text(yaml.safe_dump(settings or {}))
    ports = free_ports(2 * count)
    pickers = [
        Picker([*files, folder / "base.yaml", folder / f"pick{n}.yaml"], ports[2 * n], ports[2 * n + 1])
        for n in range(count)
    ]
    try:
        for number, each in enumerate(pickers):
            own = {"id": f"pick{number}", "port": each.http_port, "picker": {"port": each.grpc_port, **picker}}
            each.configs[-1].write_text(yaml.safe_dump({**own, "shared_port": None}))
            each.start()
        for each in pickers:
            wait_until(lambda each=each: is_ready(each.url), within_s=_STARTS_WITHIN_S)
        yield pickers
    finally:
        for each in pickers:
            each.tell(signal.SIGCONT)
            each.end()


@contextmanager
def running_envoy(
    pickers: Sequence[Picker],
    folder: Path,
    changes: Mapping[str, str] = NOTHING,
    status: int = 200,
    path: str = "/v1/models",
    edit: Callable[[list[Any], list[Any]], None] | None = None,
) -> Iterator[str]:
    """Envoy, which asks these pickers. Yields its URL when it answers on `path` with this status. Its file has some
    texts in place of others; `edit` may change its filters and its clusters."""
    assert ENVOY is not None
    text, (port,) = _FILE.read_text(), free_ports(1)
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    document = yaml.safe_load(text)
    document["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = port
    resources = document["static_resources"]
    if edit is not None:
        edit(resources["listeners"][0]["filter_chains"][0]["filters"], resources["clusters"])
    (asked,) = (each for each in document["static_resources"]["clusters"] if each["name"] == "pickers")
    asked["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each.grpc_port}}}}
        for each in pickers
    ]
    file = folder / f"envoy-{port}.yaml"
    file.write_text(yaml.safe_dump(document))
    command = [ENVOY, "-c", str(file), "--log-level", "warning", "--use-dynamic-base-id", "--concurrency", "1"]
    with file.with_suffix(".log").open("wb") as log, running(command, log):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url, path, status), within_s=_STARTS_WITHIN_S)
        yield url


def is_ready(url: str, path: str = "/ready", status: int = 200) -> bool:
    """Whether it answers with this status."""
    try:
        return httpx.get(f"{url}{path}", timeout=5, trust_env=False).status_code == status
    except httpx.HTTPError:
        return False


def ask(url: str, content: Any = None, **fields: Any) -> httpx.Response:
    """A chat request with a prompt of its own, unless one is given."""
    return httpx.post(f"{url}{CHAT}", json=chat_body(content or fresh(), **fields), timeout=60, trust_env=False)


def words_of(stream: str) -> list[str]:
    """The texts of a stream's events that are not empty."""
    events = [orjson.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    texts = (choice["delta"].get("content") for event in events for choice in event.get("choices", ()))
    return [text for text in texts if text]


def stream(url: str, content: Any = None, **fields: Any) -> AbstractContextManager[httpx.Response]:
    """A streamed chat, whose answer is read by the caller."""
    body = chat_body(content or fresh(), stream=True, **fields)
    return httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=30, trust_env=False)


def replica_of(cluster: Cluster, answer: httpx.Response) -> SimReplica:
    """The replica that an answer names."""
    return next(sim for sim in cluster.replicas if sim.id == answer.headers["x-kvgate-replica"])


def load(cluster: Cluster) -> dict[str, int]:
    """The requests in flight as Redis counts them: of each replica that has any."""
    with redis.Redis.from_url(cluster.redis_url, decode_responses=True) as client:
        found = [client.hgetall(key) for key in client.scan_iter("kvgate:*:active")]
    return {replica: int(count) for each in found for replica, count in each.items() if int(count)}


def is_idle(cluster: Cluster) -> bool:
    """Whether no load is left in Redis, and none at the engines."""
    return not load(cluster) and not any(sim.state()["running"] for sim in cluster.replicas)
