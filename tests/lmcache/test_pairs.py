"""Two gateways in front of two real engines: one computes prompts and stores them in LMCache's Redis, and the other one
loads them from there and decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.cluster import running_gateways
from bench.vllm.printed import replica_file
from tests.lmcache.conftest import SHARED
from tests.lmcache.stage import CHUNK_TOKENS, Replica, question, running
from tests.polling import wait_until
from tests.redis_server import RedisServer
from tests.vllm.workload import text

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(900)]

ROLES = {"computes": "prefill", "answers": "decode"}
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 500},
    "health": {"timeout_s": 5},
    "pairs": {"protocol": "store", "min_tokens": CHUNK_TOKENS},
}
PROMPT_BYTES = 7500
PROMPTS = 6


@pytest.fixture(scope="module")
def pair(
    redis_server: RedisServer, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Replica], list[str]]]:
    tier = {"cpu_gb": 0.25, "keep_in_cpu": False, "redis": SHARED}
    files = [replica_file(name, redis_server.url, tier) for name in ROLES]
    with running(tmp_path_factory.mktemp("pairs"), *files, secrets=secrets) as replicas:
        beside = {
            each.engine.id: f"role={ROLES[each.engine.id]},lmcache={each.server.url}"
            for each in replicas
            if each.server is not None
        }
        urls = {replica.engine.id: replica.engine.url for replica in replicas}
        with running_gateways(urls, config=CONFIG, redis_url=redis_server.url, beside=beside) as gateways:
            for url in gateways.gateway_urls:
                wait_until(lambda url=url: len(httpx.get(f"{url}/ready").json()["replicas"]) == len(ROLES))
            yield {replica.engine.id: replica for replica in replicas}, gateways.gateway_urls


def test_one_engine_loads_what_the_other_one_has_computed(pair: tuple[dict[str, Replica], list[str]]) -> None:
    replicas, urls = pair
    for number in range(PROMPTS):
        prompt = text(f"a pair {number}", PROMPT_BYTES)
        url = f"{urls[number % 2]}/v1/chat/completions"
        answer = httpx.post(url, json=question(prompt), timeout=120).raise_for_status()
        decision, usage = answer.headers["x-kvgate-decision"], answer.json()["usage"]
        print(f"\n{decision} {usage}")
        assert answer.headers["x-kvgate-replica"] == "answers"
        assert decision.endswith("prefill=computes")
        # The last chunk may end behind the last key whose place is known, so nobody waits for it.
        whole = usage["prompt_tokens"] // CHUNK_TOKENS
        assert usage["prompt_tokens_details"]["cached_tokens"] >= (whole - 1) * CHUNK_TOKENS
        assert answer.json()["choices"][0]["message"]["content"] == replicas["computes"].ask(prompt).text
