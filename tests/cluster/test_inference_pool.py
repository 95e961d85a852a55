"""Gateways follow an InferencePool, and the InferenceObjectives that a proxy names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, SimReplica
from tests.cluster.clients import CHAT, chat, held_stream
from tests.cluster.gateways import GatewayProcess, another_gateway
from tests.cluster.servers import another_server
from tests.cluster.test_discovery import use
from tests.gateway.replicas.discovery.kubernetes_api import (
    OBJECTIVES,
    PODS,
    POOLS,
    KubernetesApi,
    objective,
    pod,
    pool,
    running_kubernetes,
    service_account,
)
from tests.polling import eventually

HEADER, MODEL = "x-gateway-inference-objective", ("--model", "kvgate/pool")


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with running_kubernetes() as server:
        yield server


Gateways = Callable[..., Awaitable[GatewayProcess]]


@pytest.fixture
async def gateway(cluster: Cluster, api: KubernetesApi, tmp_path: Path) -> AsyncIterator[Gateways]:
    """Starts a gateway that follows the pool. A keyword is a section of its configuration."""
    account = str(service_account(tmp_path / "account"))
    followed = {"inference_pool": "chat", "api_url": api.url, "service_account": account}
    async with AsyncExitStack() as stack:

        async def start(name: str, header: str | None, **sections: Any) -> GatewayProcess:
            discovery = {"kubernetes": followed | {"objective_header": header}}
            started = another_gateway(cluster, name, replicas=[], discovery=discovery, **sections)
            return await stack.enter_async_context(started)

        yield start


async def test_all_gateways_follow_the_pool_and_obey_its_objectives_where_a_proxy_is_trusted_to_name_them(
    http: httpx.AsyncClient, api: KubernetesApi, gateway: Gateways, tmp_path: Path
) -> None:
    async with another_server(http, tmp_path, *MODEL) as server, another_server(http, tmp_path, *MODEL) as second:
        await api.put_object(POOLS, "chat", **pool(server.port, app="vllm"))
        await api.put_object(PODS, "vllm-0", **pod("127.0.0.1", app="vllm"))
        queue = {"engine_priority": True}
        trusting = [await gateway(name, HEADER, queue=queue) for name in ("a", "b")]
        wary = await gateway("c", None, queue=queue)
        everyone = [*trusting, wary]
        await use(http, everyone, {"vllm-0"})
        for priority, in_engine in ((1, "-1"), (-5, "1"), (0, "0")):
            await api.put_object(OBJECTIVES, "told", **objective("chat", priority))
            for each in trusting:
                await eventually(lambda each=each, told=in_engine: engine_is_told(http, each, server, told))
            assert await engine_is_told(http, wary, server, "0")
        shown = (await http.get(f"{trusting[0].url}/metrics")).text
        assert 'kvgate_discovery_up{source="objectives of chat"} 1.0' in shown
        await api.put_object(POOLS, "chat", **pool(server.port, second.port, app="vllm"))
        await use(http, everyone, {f"vllm-0-{each.port}" for each in (server, second)})
        await api.put_object(PODS, "vllm-0", **pod("127.0.0.1", ready=False, app="vllm"))
        await use(http, everyone, set())


async def test_queued_requests_of_two_gateways_go_in_the_order_of_their_objectives(
    http: httpx.AsyncClient, api: KubernetesApi, gateway: Gateways, tmp_path: Path
) -> None:
    for name, priority in (("urgent", 1), ("late", -1)):
        await api.put_object(OBJECTIVES, name, **objective("chat", priority))
    async with another_server(http, tmp_path, *MODEL, "--speed", "5", "--decode-s-per-token", "0.1") as server:
        await api.put_object(POOLS, "chat", **pool(server.port, app="vllm"))
        await api.put_object(PODS, "vllm-0", **pod("127.0.0.1", app="vllm"))
        bands = [{"name": name, "room_share": 1} for name in ("realtime", "normal", "batch")]
        sections = {"queue": {"bands": bands}, "policy": {"max_active_requests": 1}}
        a, b = [await gateway(name, HEADER, **sections) for name in ("a", "b")]
        await use(http, [a, b], {"vllm-0"})
        ended: list[str] = []

        async def ask(through: GatewayProcess, name: str) -> None:
            answer = await http.post(through.url + CHAT, json=chat(name), headers={HEADER: name})
            assert answer.status_code == 200, answer.text
            ended.append(name)

        async with asyncio.TaskGroup() as requests, held_stream(http, a.url, "first"):
            for count, (through, name) in enumerate(((a, "late"), (b, "nobody's"), (b, "urgent")), 1):
                requests.create_task(ask(through, name))
                await eventually(lambda count=count: are_queued(http, a, count))
        assert ended == ["urgent", "nobody's", "late"]


async def are_queued(http: httpx.AsyncClient, gateway: GatewayProcess, count: int) -> bool:
    pools = (await http.get(f"{gateway.url}/v1/queue")).json()["pools"]
    return sum(len(each["waiting"]) for each in pools) == count


async def engine_is_told(http: httpx.AsyncClient, gateway: GatewayProcess, server: SimReplica, priority: str) -> bool:
    """Whether the engine gets a request for the objective `told` with this priority."""
    answer = await http.post(gateway.url + CHAT, json=chat("hello"), headers={HEADER: "told"})
    assert answer.status_code == 200, answer.text
    recent = (await http.get(f"{server.url}/sim/state")).json()["recent"]
    return bool(recent[-1]["headers"]["X-Vllm-Priority"] == priority)
