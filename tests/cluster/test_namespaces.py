"""Two clusters with the same ids on one Redis: apart in namespaces of their own, and without them found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import redis

from bench.cluster import Cluster, running_cluster
from tests.cluster.clients import ask, prose
from tests.redis_server import RedisServer, running_redis

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def started(stack: ExitStack, server: RedisServer, namespace: str) -> Cluster:
    config: dict[str, Any] = {"redis": {"budget_ms": 500, "namespace": namespace}, "health": {"interval_s": 0.5}}
    return stack.enter_context(running_cluster(gateways=2, replicas=3, config=config, redis_url=server.url))


async def wrong_predictions(http: httpx.AsyncClient, cluster: Cluster, prompts: int) -> int:
    """Of prompts that are asked twice, by one gateway and then by the other: how often the second answer's tokens from
    cache were not as foretold."""
    wrong = 0
    for n in range(prompts):
        text = prose(f"{cluster.state_dir} {n}", 200)
        for url in cluster.gateway_urls:
            answer = await ask(http, url, text)
            assert answer.status_code == 200, answer.text
            assert "state=exact" in answer.headers["x-kvgate-decision"]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        wrong += abs(cached - int(answer.headers["x-kvgate-matched-tokens"])) > BLOCK_TOKENS
    return wrong


async def test_clusters_with_namespaces_of_their_own_do_not_meet(http: httpx.AsyncClient, shared: RedisServer) -> None:
    with ExitStack() as stack, redis.Redis.from_url(shared.url, decode_responses=True, protocol=2) as client:
        both = [started(stack, shared, name) for name in ("team-a", "team-b")]
        for cluster in (*both, *both):
            assert await wrong_predictions(http, cluster, 8) == 0
        for name, cluster in zip(("team-a", "team-b"), both, strict=True):
            records = client.hgetall(f"kvgate:{name}:{{{cluster.pool}}}:replicas")
            assert {replica: text.split(" ")[-1] for replica, text in records.items()} == {
                sim.id: sim.url for sim in cluster.replicas
            }
        outside = {key for key in client.scan_iter("*") if not key.startswith(("kvgate:team-a:", "kvgate:team-b:"))}
        assert outside <= {"kvgate:watcher"}
