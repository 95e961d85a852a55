"""Keys, their audit and the keys of files on four gateways, two of which have a wall clock that steps."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis
import yaml

from bench.cluster import Cluster, running_cluster
from coordinator.keys import audit_key
from tests.cluster.clients import api_key
from tests.cluster.test_file_keys import security
from tests.cluster.test_keys_in_redis import CONFIG, OPS, Operator, bearer, within_a_second
from tests.polling import eventually
from tests.redis_server import RedisServer

HOUR_S, DAY_S = 3600, 86_400
STEPPED = (0, 1)


@pytest.fixture(scope="module")
def stepped(server: RedisServer) -> Iterator[Cluster]:
    with running_cluster(gateways=4, replicas=1, config=CONFIG, redis_url=server.url) as cluster:
        for number in STEPPED:
            gateway = cluster.gateway_processes[number]
            step_of(cluster, number).write_text("0")
            options = gateway.command[gateway.command.index("gateway.ops.cli") + 1 :]
            gateway.stop()
            program = (sys.executable, "-m", "tests.cluster.stepped_wall_clock", str(step_of(cluster, number)))
            gateway.start(*program, *options)
        yield cluster
        for number in STEPPED:
            cluster.gateway_processes[number].stop()


def step_of(cluster: Cluster, number: int) -> Path:
    return cluster.state_dir / f"step{number}"


class Clocks:
    """The wall clocks of the gateways that step."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def step(self, number: int, seconds: float) -> None:
        """This far from the right time, from now on."""
        file = step_of(self._cluster, number)
        file.with_suffix(".new").write_text(str(seconds))
        file.with_suffix(".new").replace(file)


@pytest.fixture
async def clocks(stepped: Cluster, http: httpx.AsyncClient) -> AsyncIterator[Clocks]:
    clocks = Clocks(stepped)
    await eventually(lambda: are_ready(http, stepped))
    yield clocks
    for number in STEPPED:
        clocks.step(number, 0)


async def are_ready(http: httpx.AsyncClient, cluster: Cluster) -> bool:
    try:
        return all([(await http.get(f"{url}/ready")).status_code == 200 for url in cluster.gateway_urls])
    except httpx.TransportError:
        return False


@pytest.fixture
def ops(http: httpx.AsyncClient, stepped: Cluster) -> Operator:
    return Operator(http, stepped, OPS)


async def statuses(http: httpx.AsyncClient, cluster: Cluster, text: str) -> list[int]:
    return [(await http.get(f"{url}/v1/models", headers=bearer(text))).status_code for url in cluster.gateway_urls]


async def test_a_key_ends_by_each_gateways_clock_and_a_small_step_back_makes_it_valid_nowhere_again(
    stepped: Cluster, http: httpx.AsyncClient, ops: Operator, clocks: Clocks
) -> None:
    key = await ops.create("an hour", at=2, tenant="team", expires_days=1 / 24)
    await within_a_second(http, stepped, key, 200)
    clocks.step(0, 2 * HOUR_S)
    clocks.step(1, -2 * HOUR_S)
    assert await statuses(http, stepped, key["key"]) == [401, 200, 200, 200]
    clocks.step(0, 0)  # the clock was wrong
    assert await statuses(http, stepped, key["key"]) == [200] * 4
    clocks.step(0, HOUR_S + 20)
    assert (await statuses(http, stepped, key["key"]))[0] == 401
    clocks.step(0, HOUR_S - 20)
    assert (await statuses(http, stepped, key["key"]))[0] == 401


async def test_a_revocation_counts_whatever_the_clocks_say_and_the_audit_keeps_the_order(
    stepped: Cluster, http: httpx.AsyncClient, ops: Operator, clocks: Clocks, server: RedisServer
) -> None:
    clocks.step(0, DAY_S)
    clocks.step(1, -DAY_S)
    async with redis.Redis.from_url(server.url, protocol=2) as store:  # Redis' clock was an hour ahead until now
        ahead_ms = int(time.time() * 1000) + HOUR_S * 1000
        await store.xadd(audit_key(), {"who": "ops", "what": "before", "subject": "", "tenant": ""}, id=f"{ahead_ms}-0")
    old = await ops.create("by the late clock", at=0, tenant="team", expires_days=30)
    await within_a_second(http, stepped, old, 200)
    new = (await ops.send("POST", f"/v1/keys/{old['id']}/rotate", at=1)).json()
    await within_a_second(http, stepped, new, 200)
    assert (await ops.revoke(old, at=1)).status_code == 200
    await within_a_second(http, stepped, old, 401)
    assert (await ops.revoke(new, at=0)).status_code == 200
    await within_a_second(http, stepped, new, 401)
    for seconds in (-DAY_S, DAY_S):
        clocks.step(0, seconds)
        for key in (old, new):
            assert await statuses(http, stepped, key["key"]) == [401] * 4
    told = (await ops.send("GET", "/v1/audit", at=3)).json()["entries"]
    assert [each["what"] for each in told[:5]] == ["revoke key", "revoke key", "rotate key", "create key", "before"]
    assert [each["at_ms"] for each in told] == sorted((each["at_ms"] for each in told), reverse=True)


async def test_a_gateway_that_takes_all_records_for_forgotten_takes_none_from_the_others(
    stepped: Cluster, http: httpx.AsyncClient, ops: Operator, clocks: Clocks
) -> None:
    kept, revoked = await ops.create("kept", tenant="team"), await ops.create("gone", tenant="team")
    await ops.revoke(revoked)
    await within_a_second(http, stepped, kept, 200)
    await within_a_second(http, stepped, revoked, 401)
    clocks.step(0, 500 * DAY_S)
    for _ in range(40):
        assert await statuses(http, stepped, kept["key"]) == [401, 200, 200, 200]
        assert await statuses(http, stepped, revoked["key"]) == [401] * 4
    clocks.step(0, 0)
    await within_a_second(http, stepped, kept, 200)
    assert await statuses(http, stepped, revoked["key"]) == [401] * 4


@pytest.mark.parametrize("seconds", [-DAY_S, DAY_S])
async def test_the_newest_file_counts_also_if_the_clock_of_its_gateway_is_wrong(
    stepped: Cluster, http: httpx.AsyncClient, clocks: Clocks, seconds: int
) -> None:
    clocks.step(0, seconds)
    file = stepped.state_dir / "gw0.yaml"
    before, text = file.read_text(), f"a-key-of-{seconds}"
    boss = CONFIG["security"]["api_keys"]
    changed = security(*boss, api_key("more", text)) | {"records_secret": CONFIG["security"]["records_secret"]}
    try:
        file.write_text(yaml.safe_dump(yaml.safe_load(before) | {"security": changed}))
        await eventually(lambda: all_answer(http, stepped, text, 200))
    finally:
        file.write_text(before)
    await eventually(lambda: all_answer(http, stepped, text, 401))


async def all_answer(http: httpx.AsyncClient, cluster: Cluster, text: str, status: int) -> bool:
    return await statuses(http, cluster, text) == [status] * 4
