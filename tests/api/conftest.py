"""Clusters of real processes, started once for all API tests. Every test sends prompts that no other test sends.

Each replica publishes KV events and has an agent, unless a fixture says otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from bench.cluster import Cluster, running_cluster
from tests.api.stage import PATIENT_REDIS, Stage, api_key, bearer, running_gateway, running_sims, sdk
from tests.forked import constants

PATIENT: dict[str, Any] = {"redis": PATIENT_REDIS, "health": {"timeout_s": 5}}
UNKNOWN = "/v1/nonesuch"
"""A path that no engine serves, and that gateways pass on all the same."""
OPEN: dict[str, Any] = {
    **PATIENT,
    "policy": {"allow_header": True},
    "log": {"level": "debug", "access_log": "-"},
    "security": {"allowed_paths": [UNKNOWN]},
}
GUARDED: dict[str, Any] = {
    **PATIENT,
    "security": {
        "api_keys": [
            api_key("alice", "research"),
            api_key("anna", "research"),
            api_key("bob", "sales"),
            api_key("root", "operations", admin=True),
        ],
        "cache_salt_secret": "canary-cache-salt-secret",
        "image_hosts": ["images.example", "10.1.2.3"],
        "allowed_paths": [UNKNOWN],
    },
    "log": {"level": "debug", "access_log": "-"},
}


@pytest.fixture(scope="package", autouse=True)
def unmoved() -> Iterator[None]:
    """Neither breakers nor retry budgets react to the failures that tests cause. Gateways see new certificates soon."""
    unmoved = {
        "coordinator.breaker.FAILURES": 1000,
        "gateway.relay.retry_budget.MIN_RETRIES": 1000,
        "gateway.tls.LOOK_S": 0.25,
    }
    with constants(unmoved):
        yield


@pytest.fixture(scope="package")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as client:
        yield client


@pytest.fixture(scope="package")
def open_cluster() -> Iterator[Cluster]:
    """Two gateways without API keys, three replicas."""
    with running_cluster(gateways=2, replicas=3, replica_arguments=("--speed", "0"), config=OPEN) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def guarded_cluster() -> Iterator[Cluster]:
    """Two gateways with API keys of three tenants, two replicas. Alice and anna share a tenant; root is an admin."""
    with running_cluster(gateways=2, replicas=2, replica_arguments=("--speed", "0"), config=GUARDED) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def stage(open_cluster: Cluster, http: httpx.Client) -> Stage:
    return Stage(open_cluster.gateway_urls, open_cluster.replicas, http).taught()


@pytest.fixture(scope="package")
def guarded(guarded_cluster: Cluster, http: httpx.Client) -> Stage:
    return Stage(guarded_cluster.gateway_urls, guarded_cluster.replicas, http).taught(bearer("root"))


@pytest.fixture(scope="package")
def sharing(guarded_cluster: Cluster, guarded: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The guarded cluster's replicas behind a gateway whose tenants trust each other."""
    security = {**GUARDED["security"], "share_cache": True, "expose_decisions": True, "allow_priority": True}
    folder = tmp_path_factory.mktemp("sharing")
    with running_gateway(folder, guarded_cluster.redis_url, guarded.sims, {"security": security}) as url:
        yield replace(guarded, gateways=[url])


@pytest.fixture(scope="package")
def mixed(open_cluster: Cluster, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Three base models: `a` on m0 and m1, `b` on m2, and `slow`, which answers slowly, on m3. Only m1 has the adapter
    `a-french`."""
    folder = tmp_path_factory.mktemp("mixed")
    models = {
        "m0": ("--model", "org/a", "--served-name", "a"),
        "m1": ("--model", "org/a", "--served-name", "a", "--adapter", "a-french"),
        "m2": ("--model", "org/b", "--served-name", "b"),
        "m3": ("--model", "org/slow", "--served-name", "slow", "--speed", "1"),
    }
    with (
        running_sims(folder, models) as sims,
        running_gateway(folder, open_cluster.redis_url, sims, {}) as url,
    ):
        yield Stage([url], sims, http)


@pytest.fixture(scope="package")
def unfollowed(open_cluster: Cluster, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two replicas without events, in their own pool, behind one gateway."""
    folder = tmp_path_factory.mktemp("unfollowed")
    arguments = ("--no-events", "--model", "org/unfollowed", "--served-name", "sim")
    with (
        running_sims(folder, {"u0": arguments, "u1": arguments}) as sims,
        running_gateway(folder, open_cluster.redis_url, sims, {}) as url,
    ):
        yield Stage([url], sims, http)


@pytest.fixture(scope="package")
def client(stage: Stage) -> Iterator[openai.OpenAI]:
    """The official SDK on the first gateway."""
    with sdk(stage.gateways[0]) as client:
        yield client


@pytest.fixture(scope="package")
def other_client(stage: Stage) -> Iterator[openai.OpenAI]:
    """The official SDK on the second gateway."""
    with sdk(stage.gateways[1]) as client:
        yield client


@pytest.fixture
async def async_client(stage: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    url = stage.gateways[0]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
