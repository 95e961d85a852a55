"""A real engine's own scheduler agrees with the bands of tenants: it runs a request of realtime before those of batch
that came earlier."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from bench.cluster import running_gateways
from bench.vllm import install
from bench.vllm.replicas import VllmReplica
from gateway.ops.local.ports import free_ports
from tests.api.stage import api_key, bearer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EARLIER = 4
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 500},
    "health": {"timeout_s": 5},
    "queue": {"max_wait_s": 0, "engine_priority": True},  # all that waits, waits in the engine
    "tenants": [{"name": "dialogs", "priority": "realtime"}, {"name": "reports", "priority": "batch"}],
    "security": {
        "api_keys": [api_key("alice", "dialogs"), api_key("bob", "reports")],
        "cache_salt_secret": "canary-cache-salt-secret",
    },
}


@dataclass
class OneAtATime(VllmReplica):
    """An engine that runs one request, by priority, while the others wait in it."""

    def command(self) -> list[str]:
        command = super().command()
        at = command.index("--max-num-seqs") + 1
        command[at] = "1"
        return [*command, "--scheduling-policy", "priority"]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    port, events, replay = free_ports(3)
    engine = OneAtATime("r0", port, tmp_path_factory.mktemp("priority") / "r0.log", events, replay, 256, install.TINY)
    engine.start()
    try:
        engine.wait_until_healthy()
        with running_gateways({engine.id: engine.url}, gateways=2, config=CONFIG) as cluster:
            yield cluster.gateway_urls
    finally:
        engine.kill()


async def test_what_is_urgent_is_computed_before_what_came_earlier(gateways: list[str]) -> None:
    ended: list[str] = []
    has_begun = asyncio.Event()

    async def ask(who: str, name: str, url: str) -> None:
        body = {
            "model": install.MODEL,
            "prompt": f"{name} " * 20,
            "max_tokens": 1500,
            "stream": True,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(timeout=300) as http:
            request = http.stream("POST", f"{url}/v1/completions", json=body, headers=bearer(who))
            async with request as answer:
                assert answer.status_code == 200, await answer.aread()
                async for _ in answer.aiter_lines():
                    has_begun.set()
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        for number in range(EARLIER):
            group.create_task(ask("bob", f"report {number}", gateways[number % 2]))
        await has_begun.wait()
        group.create_task(ask("alice", "dialog", gateways[0]))
    assert len(ended) == EARLIER + 1
    assert ended.index("dialog") <= 1, f"only the one that ran already may end before it: {ended}"
