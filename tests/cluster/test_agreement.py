"""N gateways route like one: a small mix `contexts` of bench.routing, with bounds that chance does not cross."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, running_cluster
from bench.load import Spread, pinned_spread, random_spread, run
from bench.workloads import shared_contexts
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import ask
from tests.cluster.gateways import another_gateway
from tests.cluster.ledger import Ledger
from tests.polling import eventually

CONCURRENCY = 8
WARM_UP, REQUESTS = 40, 160
# 9 documents and 3 images have 32 000 tokens: one replica can hold half of them, three together hold all.
CONTEXTS = {"documents": 9, "images": 3}
REPLICA_ARGUMENTS = ("--speed", "40", "--num-gpu-blocks", "1024")
CONFIG = {"redis": PATIENT_REDIS}
AS_GOOD_AS = 0.03
"""`python -m bench.routing --mixes contexts` sends 2 000 requests and finds a difference of 0.1 %."""


class Experiment:
    """Runs the same requests several times, each time with empty caches and an empty store."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger) -> None:
        self.cluster = cluster
        self._http = http
        self._ledger = ledger

    async def cache_share(self, spread: Spread) -> float:
        """The share of prompt tokens that the engines had cached. Every request must be answered."""
        await self._empty()
        requests = shared_contexts(WARM_UP + REQUESTS, seed=7, **CONTEXTS)
        warm_up = await run(requests[:WARM_UP], spread, CONCURRENCY)
        result = await run(requests[WARM_UP:], spread, CONCURRENCY)
        assert (warm_up.failed, result.failed, result.requests) == (0, 0, REQUESTS)
        return result.cache_share

    async def _empty(self) -> None:
        for replica in self.cluster.replicas:
            (await self._http.post(f"{replica.url}/reset_prefix_cache")).raise_for_status()
            await ask(self._http, replica.url, "vLLM tells of a reset with its next step")
        await self._ledger.forget_everything()
        await eventually(self._is_followed)

    async def _is_followed(self) -> bool:
        """Whether all agents have registered again in the empty store."""
        return await self._ledger.agents() == {replica.id for replica in self.cluster.replicas}

    async def through(self, urls: Sequence[str]) -> float:
        """The share through gateways behind a random load balancer."""
        return await self.cache_share(random_spread(urls, seed=len(urls)))

    async def pinned(self) -> float:
        """The best possible share: each document and image goes directly to one replica."""
        return await self.cache_share(pinned_spread([replica.url for replica in self.cluster.replicas]))


@pytest.fixture(scope="module")
def four_gateways() -> Iterator[Cluster]:
    with running_cluster(gateways=4, replicas=3, replica_arguments=REPLICA_ARGUMENTS, config=CONFIG) as cluster:
        yield cluster


@pytest.fixture
async def experiment(four_gateways: Cluster, http: httpx.AsyncClient) -> AsyncIterator[Experiment]:
    async with redis.Redis.from_url(four_gateways.redis_url, decode_responses=True, protocol=2) as client:
        yield Experiment(four_gateways, http, Ledger(client, four_gateways.pool))


async def test_however_many_gateways_there_are_they_hit_as_if_requests_were_pinned(experiment: Experiment) -> None:
    """Round robin with the same requests hits clearly less."""
    pinned = await experiment.pinned()
    shares = {count: await experiment.through(experiment.cluster.gateway_urls[:count]) for count in (1, 4)}
    assert shares == {count: pytest.approx(pinned, abs=AS_GOOD_AS) for count in shares}
    assert abs(shares[1] - shares[4]) < AS_GOOD_AS
    policy = {"name": "round_robin"}
    async with (
        another_gateway(experiment.cluster, "turns0", policy=policy) as one,
        another_gateway(experiment.cluster, "turns1", policy=policy) as two,
    ):
        taking_turns = await experiment.through([one.url, two.url])
    assert taking_turns < pinned - 0.15
