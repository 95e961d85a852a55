"""What asks an Envoy with pickers (bench/envoy.py), and looks at what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import redis

from bench import envoy
from bench.cluster import Cluster, SimReplica
from bench.envoy import NOTHING
from bench.pickers import Picker
from tests.api.stage import chat_body, fresh

CHAT = "/v1/chat/completions"


@contextmanager
def running_envoy(
    pickers: Sequence[Picker], folder: Path, changes: Mapping[str, str] = NOTHING, **others: Any
) -> Iterator[str]:
    """The URL of an Envoy that asks these pickers."""
    with envoy.running_envoy(pickers, folder, changes, **others) as running:
        yield running.url


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
