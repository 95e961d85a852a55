"""The cluster without failures, as clients, Prometheus and an auditor see it."""

from __future__ import annotations

import time
from itertools import pairwise

import httpx
import openai
import pytest

from tests.cluster.clients import ask, prose
from tests.compose.cluster import ComposeCluster
from tests.polling import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


async def test_a_prompt_asked_again_is_a_hit_whichever_gateway_serves_it(
    cluster: ComposeCluster, http: httpx.AsyncClient
) -> None:
    text = prose("asked again")
    before = await cluster.chats_answered()
    first, *later = [await ask(http, cluster.url, text) for _ in range(7)]
    assert first.headers["x-kvgate-decision"].startswith("cold;")
    for answer in later:
        assert answer.headers["x-kvgate-decision"].startswith("hit;")
        assert answer.headers["x-kvgate-replica"] == first.headers["x-kvgate-replica"]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
    after = await cluster.chats_answered()
    assert len(after) == 2
    assert all(after[gateway] > before[gateway] for gateway in after), "one gateway served all"


async def test_agents_make_every_replica_exact(cluster: ComposeCluster, http: httpx.AsyncClient) -> None:
    for gateway in await cluster.containers("gateway"):
        for replica in ("r0", "r1", "r2"):
            await eventually(lambda g=gateway, r=replica: cluster.metric(g, "kvgate_replica_exact", replica=r), 30)
    answer = await ask(http, cluster.url, prose("exact"))
    assert answer.headers["x-kvgate-decision"].endswith("state=exact")


async def test_the_official_sdk_gets_a_stream_event_by_event(sdk: openai.AsyncOpenAI) -> None:
    started = time.monotonic()
    stream = await sdk.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "unbuffered"}], max_tokens=100, stream=True
    )
    at_s = [time.monotonic() - started async for event in stream if event.choices]
    assert len(at_s) >= 100
    # 100 tokens take 20 ms each.
    assert at_s[-1] > 2
    assert at_s[0] < 0.5, "the first event waited for others"
    gaps_s = [later - earlier for earlier, later in pairwise(at_s)]
    assert max(gaps_s) < 0.5, "events came in bunches"


async def test_prometheus_finds_every_gateway_and_replica_and_has_their_metrics(
    cluster: ComposeCluster, sdk: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    await sdk.chat.completions.create(model="sim", messages=[{"role": "user", "content": "counted"}])

    async def targets() -> list[tuple[str, str]]:
        found = await cluster.ask_prometheus(http, "targets", state="active")
        return sorted((target["labels"]["job"], target["health"]) for target in found["activeTargets"])

    async def value(query: str) -> float:
        series = (await cluster.ask_prometheus(http, "query", query=query))["result"]
        return float(series[0]["value"][1]) if series else 0.0

    async def are_all_up() -> bool:
        return await targets() == [("kvgate", "up")] * 2 + [("vllm", "up")] * 3

    await eventually(are_all_up, 30)
    await eventually(lambda: value('sum(kvgate_requests_total{path="/v1/chat/completions"})'), 30)
    await eventually(lambda: value("sum(vllm:prompt_tokens_total)"), 30)
    assert await value("count(kvgate_store_up == 1)") == 2
    assert await value("count(vllm:num_requests_running)") == 3


async def test_no_container_runs_as_root_or_can_write_to_its_image_or_gain_rights(cluster: ComposeCluster) -> None:
    containers = await cluster.containers()
    assert len(containers) == 11
    for container in containers:
        found = await cluster.inspect(container)
        user = found["Config"]["User"].split(":")[0]
        assert user.isdecimal(), found["Name"]
        assert int(user) > 0, found["Name"]
        assert found["HostConfig"]["ReadonlyRootfs"], found["Name"]
        assert found["HostConfig"]["CapDrop"] == ["ALL"], found["Name"]
        assert not found["HostConfig"]["CapAdd"], found["Name"]
        assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"], found["Name"]
        processes = (await cluster.docker("top", container, "-eo", "pid,uid")).split("\n")[1:]
        assert all(line.split()[1] == user for line in processes if line), found["Name"]


async def test_whatever_can_be_asked_has_a_health_check_and_is_well(cluster: ComposeCluster) -> None:
    for container in await cluster.containers():
        found = await cluster.inspect(container)
        health = found["State"].get("Health", {}).get("Status")
        assert health == (None if "-agent-" in found["Name"] else "healthy"), found["Name"]
