"""One replica computes a prompt and stores its KV cache in LMCache's Redis, and another one loads it from there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, SimReplica, running_gateways, running_replicas
from tests.cluster.clients import CHAT, prose
from tests.cluster.test_pairs import decision_of
from tests.polling import wait_until
from tests.redis_server import running_redis

CHUNK_TOKENS = 64
PRICE = 0.001
"""Of a prompt token that no replica had cached."""
_COST = r"^kvgate_cost_total\{.*\} (\S+)$"
ROLES = {"r0": "role=prefill", "r1": "role=decode", "r2": "role=decode"}
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 500},
    "pairs": {"protocol": "store", "min_tokens": 100},
    "billing": {"prices": [{"model": "sim", "uncached_input_per_mtok": 1000.0, "cached_input_per_mtok": 0.0}]},
    "hedge": {"max_share": 0},
}


@pytest.fixture(scope="module")
def pairs() -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder, running_redis() as server:
        lmcache = f"redis_url={server.url},chunk_tokens={CHUNK_TOKENS}"
        arguments = ("--speed", "5", "--lmcache", lmcache)
        with (
            running_replicas(Path(folder), len(ROLES), arguments) as sims,
            running_gateways(
                {sim.id: sim.url for sim in sims},
                config=CONFIG,
                redis_url=server.url,
                beside={sim.id: f"lmcache={sim.url}/lmcache,{ROLES[sim.id]}" for sim in sims},
            ) as cluster,
        ):
            for url in cluster.gateway_urls:
                wait_until(lambda url=url: len(httpx.get(f"{url}/ready").json()["replicas"]) == len(ROLES))
            yield cluster, {sim.id: sim for sim in sims}


def test_decode_loads_what_the_prefill_has_stored_and_nobody_calls_that_a_saving(
    pairs: tuple[Cluster, dict[str, SimReplica]],
) -> None:
    cluster, replicas = pairs
    prompt_tokens = 0
    for number in range(2):
        text = prose(f"stored {number}")
        body = {"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
        answer = httpx.post(cluster.gateway_urls[number % 2] + CHAT, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert decision_of(answer)["prefill"] == "r0"
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 2 * CHUNK_TOKENS
        prompt_tokens += usage["prompt_tokens"]
        alone = httpx.post(replicas["r0"].url + CHAT, json=body, timeout=60).json()
        assert answer.json()["choices"][0]["message"] == alone["choices"][0]["message"]
    costs = [
        float(cost)
        for url in cluster.gateway_urls
        for cost in re.findall(_COST, httpx.get(f"{url}/metrics").text, re.M)
    ]
    assert sum(costs) == pytest.approx(prompt_tokens * PRICE)
