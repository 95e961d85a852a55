"""A full gateway refuses requests with a Retry-After, and recovers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.stage import Stage, chat_body, error_of, running_gateway, text
from tests.polling import eventually

MAX_IN_FLIGHT = 3


@pytest.fixture(scope="module")
def small(stage: Stage, open_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A gateway that serves three requests at a time."""
    config = {"limits": {"max_in_flight": MAX_IN_FLIGHT}}
    folder = tmp_path_factory.mktemp("small")
    with running_gateway(folder, open_cluster.redis_url, stage.sims, config) as url:
        yield Stage([url], stage.sims, stage.http)


async def test_a_full_gateway_answers_429_with_retry_after_and_recovers(small: Stage) -> None:
    path = small.gateways[0] + "/v1/chat/completions"
    async with httpx.AsyncClient(timeout=20) as client:
        with small.failing("hang"):
            held = [asyncio.ensure_future(client.post(path, json=chat_body(text(50)))) for _ in range(MAX_IN_FLIGHT)]
            await eventually(lambda: small.sample("kvgate_requests_in_flight") == MAX_IN_FLIGHT)
            refused = await client.post(path, json=chat_body(text(50)))
            assert refused.status_code == 429
            assert (error_of(refused)["code"], error_of(refused)["type"]) == ("gateway_overloaded", "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
            # The gateway still answers operators and load balancers.
            for probe in ("/health", "/ready", "/metrics", "/v1/models"):
                assert small.get(probe).status_code == 200
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
        await eventually(lambda: small.sample("kvgate_requests_in_flight") == 0)
        assert (await client.post(path, json=chat_body(text(50)))).status_code == 200
