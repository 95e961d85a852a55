"""The profile `pairs`: one replica computes prompts for the two others."""

from __future__ import annotations

import httpx
import pytest

from tests.cluster.clients import ask, prose
from tests.compose.cluster import ComposeCluster, running_cluster
from tests.polling import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


async def all_ready(cluster: ComposeCluster, gateway: str) -> bool:
    return await cluster.metric(gateway, "kvgate_replica_ready") == 3


async def test_a_prompt_is_computed_by_one_replica_and_decoded_by_another(http: httpx.AsyncClient) -> None:
    with running_cluster("pairs") as cluster:
        gateways = await cluster.containers("gateway-pairs")
        for each in gateways:
            await eventually(lambda one=each: all_ready(cluster, one), 30)
        answer = await ask(http, cluster.url, prose("a pair"))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvgate-replica"] in ("r1", "r2")
        assert "; prefill=r0" in answer.headers["x-kvgate-decision"]
        computed = [await cluster.metric(each, "kvgate_prefills_total", outcome="computed") for each in gateways]
        assert sorted(computed) == [0, 1]
