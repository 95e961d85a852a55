"""Engines whose events name no sessions (vLLM before 0.30). Nothing is believed of what they tell."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import redis

from bench.cluster import Cluster
from coordinator.keys import PoolKeys, pool_slug
from coordinator.registry import UNCONFIRMED, AgentRecord
from gateway.ops.local.ports import free_ports
from tests.api.stage import Stage, chat_body, running_agent, running_gateway, running_sims, text
from tests.polling import wait_until

CHAT, MODEL = "/v1/chat/completions", "org/old"


def mode_of_agent(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url, decode_responses=True) as store:
        record = store.hget(PoolKeys(pool_slug(MODEL)).agents, "old")
    return AgentRecord.parse(str(record)).mode if record else ""


@pytest.fixture
def old(open_cluster: Cluster, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A simulated vLLM 0.29 behind one gateway. Its agent needs the events' address as an option."""
    folder = tmp_path_factory.mktemp("old")
    events, replay = free_ports(2)
    publisher = ("--vllm-version", "0.29.0", "--events-port", str(events), "--replay-port", str(replay))
    endpoints = ("--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}")
    with (
        running_sims(folder, {"old": (*publisher, "--model", MODEL, "--served-name", "sim")}) as sims,
        running_gateway(folder, open_cluster.redis_url, sims, {}) as url,
        running_agent(folder, open_cluster.redis_url, sims[0], *endpoints),
    ):
        wait_until(lambda: mode_of_agent(open_cluster.redis_url) == UNCONFIRMED)
        yield Stage([url], sims, http)


def test_a_replica_with_an_older_vllm_is_degraded_and_serves(old: Stage, open_cluster: Cluster) -> None:
    body = chat_body(text())
    assert old.post(CHAT, body).headers["x-kvgate-decision"].endswith("state=degraded")
    warm = old.post(CHAT, body)
    assert (warm.status_code, warm.headers["x-kvgate-decision"].partition(";")[0]) == (200, "hit")
    assert warm.headers["x-kvgate-decision"].endswith("state=degraded")
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 900
    assert {owner["kind"] for key in old.explain(body)["chain"] for owner in key["owners"]} == {"claim"}
    assert old.exact() == []
    assert mode_of_agent(open_cluster.redis_url) == UNCONFIRMED
