"""The secret of records is replaced while four gateways run, as docs/how-to/rotate-a-key.md says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import cycle

import httpx
import pytest
import yaml

from bench.cluster import Cluster, running_cluster
from tests.cluster.test_keys_in_redis import CONFIG, OPS, SECRET, Operator, bearer, is_served, within_a_second
from tests.polling import eventually

NEW = "another-secret-of-gateways"
_PAUSE_S = 0.01
STEPS = [
    {"records_secret": SECRET, "other_records_secret": NEW},
    {"records_secret": NEW, "other_records_secret": SECRET},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(gateways=4, replicas=1, config=CONFIG) as cluster:
        yield cluster


async def restart_with(http: httpx.AsyncClient, cluster: Cluster, number: int, secrets: dict[str, str]) -> None:
    async def is_ready() -> bool:
        try:
            return (await http.get(f"{cluster.gateway_urls[number]}/ready")).status_code == 200
        except httpx.TransportError:
            return False

    own = cluster.state_dir / f"gw{number}.yaml"
    own.write_text(yaml.safe_dump(yaml.safe_load(own.read_text()) | {"security": secrets}))
    await asyncio.to_thread(cluster.gateway_processes[number].stop)
    cluster.gateway_processes[number].start()
    await eventually(is_ready)


@asynccontextmanager
async def asked_all_the_time(http: httpx.AsyncClient, cluster: Cluster, *keys: str) -> AsyncIterator[list[int]]:
    """The statuses of requests with these keys, through all gateways that run."""
    statuses: list[int] = []

    async def ask() -> None:
        for url in cycle(cluster.gateway_urls):
            for key in keys:
                with suppress(httpx.TransportError):
                    statuses.append((await http.get(f"{url}/v1/models", headers=bearer(key))).status_code)
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask())
        yield statuses
        asking.cancel()


async def test_the_secret_of_records_is_replaced_and_no_key_is_refused(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    ops = Operator(http, cluster, OPS)
    made = [await ops.create("first", tenant="team")]
    await within_a_second(http, cluster, made[0], 200)
    async with asked_all_the_time(http, cluster, made[0]["key"], OPS) as statuses:
        for when, step in enumerate(STEPS):
            for number in range(4):
                await restart_with(http, cluster, number, step)
                key = await ops.create(f"{when} {number}", at=number, tenant="team")
                await within_a_second(http, cluster, key, 200)
                made.append(key)
            rotated = await ops.send("POST", f"/v1/keys/{made[-1]['id']}/rotate", 3)
            assert rotated.status_code == 200, rotated.text
            gone = made.pop(1)
            assert (await ops.revoke(gone)).status_code == 200
            await within_a_second(http, cluster, gone, 401)
        await eventually(lambda: are_all_signed(http, cluster), within_s=90)
        for number in range(4):
            await restart_with(http, cluster, number, {"records_secret": NEW})
    assert set(statuses) == {200}
    assert all([await is_served(http, cluster, key) for key in made])
    for url in cluster.gateway_urls:
        assert not (await http.get(f"{url}/ready")).json().keys() & {
            "ignored_records",
            "records_to_sign",
            "has_older_keys",
        }


async def are_all_signed(http: httpx.AsyncClient, cluster: Cluster) -> bool:
    return not any(["records_to_sign" in (await http.get(f"{url}/ready")).json() for url in cluster.gateway_urls])
