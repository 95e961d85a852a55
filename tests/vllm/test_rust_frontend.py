"""vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND=1). Its metrics lack the engine's start time and the size of its
cache, and it has neither /v1/responses nor /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.vllm.replicas import BLOCK_TOKENS, VllmCluster, running_cluster
from tests.polling import eventually
from tests.vllm.clients import Client
from tests.vllm.conftest import BLOCKS, CONFIG
from tests.vllm.workload import Messages

pytestmark = pytest.mark.vllm


@pytest.fixture
def rust() -> Iterator[VllmCluster]:
    with running_cluster(replicas=1, gateways=1, blocks=BLOCKS, config=CONFIG, has_rust_frontend=True) as cluster:
        yield cluster


async def test_what_an_engine_behind_the_rust_front_end_holds_is_known_exactly(
    rust: VllmCluster, http: httpx.AsyncClient
) -> None:
    (url,) = rust.gateway_urls
    client = Client(http, url)
    messages: Messages = [{"role": "user", "content": "one two three four " * 100}]

    async def is_exact() -> bool:
        return (await http.get(url + "/ready")).json()["exact"] == ["r0"]

    await eventually(is_exact, within_s=30)
    cold = await client.ask(messages)
    assert (cold.state, cold.matched_tokens, cold.cached_tokens) == ("exact", 0, 0)

    async def is_served_from_cache() -> bool:
        reply = await client.ask(messages, stream=True)
        assert reply.is_as_predicted
        return reply.state == "exact" and reply.matched_tokens > cold.prompt_tokens - 2 * BLOCK_TOKENS

    await eventually(is_served_from_cache, within_s=10)
    (await http.post(rust.replica("r0").url + "/reset_prefix_cache")).raise_for_status()
    other: Messages = [{"role": "user", "content": "another prompt, with which the engine makes a step"}]

    async def is_forgotten() -> bool:
        await client.ask(other)
        return not (await client.explain(messages))["chain"][-1]["owners"]

    await eventually(is_forgotten, within_s=10)
