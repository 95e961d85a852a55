"""A data-parallel server is one replica per rank, because each rank has its own cache, or it is refused with a
message. vLLM's two front ends count ranks differently in a request's header."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, SimReplica
from tests.cluster.clients import ask, prose
from tests.cluster.gateways import another_gateway, configured_like, started_gateway
from tests.cluster.servers import another_server, answers
from tests.polling import eventually

# Its own model and so its own pool: the cluster's gateways do not see it.
ARGUMENTS = ("--data-parallel", "2", "--model", "kvgate/two-ranks")


@pytest.fixture
async def server(tmp_path: Path, http: httpx.AsyncClient) -> AsyncIterator[SimReplica]:
    """A simulated server with two ranks behind one address."""
    async with another_server(http, tmp_path, *ARGUMENTS) as server:
        yield server


async def state(http: httpx.AsyncClient, server: SimReplica) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(f"{server.url}/sim/state")).json()
    return found


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({}, "a data-parallel server with 2 ranks, 0 to 1, behind one address: list it once per rank"),
        ({"dp_rank": 2}, "dp_rank is 2, but its server has 2 ranks, 0 to 1"),
    ],
    ids=["without a rank", "with a rank that it does not have"],
)
async def test_listed_so_that_no_rank_is_meant_it_is_refused_with_what_to_do_instead(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica, tmp_path: Path, listed: dict[str, int], said: str
) -> None:
    config = configured_like(cluster, "unranked", replicas=[{"id": "dp", "url": server.url, **listed}])
    async with started_gateway(tmp_path, config) as gateway:
        await eventually(lambda: answers(http, f"{gateway.url}/health"))
        ready = await http.get(f"{gateway.url}/ready")
        assert ready.status_code == 503
        (reason,) = ready.json()["reasons"]
        assert reason.startswith("replica dp:")
        assert said in reason
        answer = await ask(http, gateway.url, "hello")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert (await state(http, server))["requests"] == 0


@pytest.mark.parametrize("front_end", ["python", "rust"])
@pytest.mark.parametrize("first", [0, 2], ids=["a whole deployment", "the second node of one"])
async def test_listed_once_per_rank_each_rank_is_a_replica_with_a_cache_of_its_own(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path, first: int, front_end: str
) -> None:
    arguments = ["--data-parallel", "2", "--data-parallel-start-rank", str(first)]
    arguments += ["--model", f"kvgate/{front_end}-ranks-{first}", *(["--rust-frontend"] if front_end == "rust" else [])]
    header = {f"place{place}": str(place + (first if front_end == "rust" else 0)) for place in range(2)}
    async with another_server(http, tmp_path, *arguments) as server:
        ranks = [{"id": f"place{place}", "url": server.url, "dp_rank": first + place} for place in range(2)]
        async with another_gateway(cluster, "ranked", replicas=ranks) as gateway:
            texts = [prose(f"for a rank {n}") for n in range(8)]
            asked = [await ask(http, gateway.url, text) for text in texts]
            replicas = [answer.headers["x-kvgate-replica"] for answer in asked]
            assert set(replicas) == {"place0", "place1"}
            again = [await ask(http, gateway.url, text) for text in texts]
            assert [answer.headers["x-kvgate-replica"] for answer in again] == replicas
            assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in again)
            recent = (await state(http, server))["recent"]
            assert [one["headers"]["X-data-parallel-rank"] for one in recent] == [header[name] for name in replicas * 2]


async def test_a_server_of_one_rank_needs_no_rank_and_is_told_none(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    arguments = ("--data-parallel-start-rank", "1", "--model", "kvgate/one-rank")
    async with another_server(http, tmp_path, *arguments) as server:
        for name, rank in (("unnamed", {}), ("named", {"dp_rank": 1})):
            listed = [{"id": name, "url": server.url, **rank}]
            async with another_gateway(cluster, name, replicas=listed) as gateway:
                answer = await ask(http, gateway.url, "hello")
                assert answer.headers["x-kvgate-replica"] == name
        recent = (await state(http, server))["recent"]
        assert ["X-data-parallel-rank" in request["headers"] for request in recent] == [False, False]
