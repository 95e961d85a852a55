"""One cluster for all tests of this folder, which `make compose-test` runs. It is complete before each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.compose.cluster import ComposeCluster, running_cluster


@pytest.fixture(scope="package")
def running() -> Iterator[ComposeCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
async def cluster(running: ComposeCluster) -> ComposeCluster:
    """Restarts services that the test before killed, and restores the number of gateways."""
    await running.up()
    return running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=None)) as client:
        yield client


@pytest.fixture
async def sdk(cluster: ComposeCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """The SDK without retries, so that it hides no failure."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client
