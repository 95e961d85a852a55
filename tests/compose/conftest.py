"""One cluster for all tests of this folder, which `make compose-test` runs; each finds it whole."""

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
    """What the test before left dead, or scaled, is as the file says again."""
    await running.up()
    return running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=None)) as client:
        yield client


@pytest.fixture
async def sdk(cluster: ComposeCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """It must not hide a failure by asking again."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client
