"""Four gateways with a file each, which are changed one after another: the keys of the newest file count at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.cluster import Cluster, running_cluster
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import api_key
from tests.cluster.gateways import another_gateway
from tests.cluster.test_reload import OLD, OPS
from tests.polling import eventually
from tests.redis_server import RedisServer

NEW = api_key("new", "new-key-0123456789")
_AT_ONCE_S = 0.1
"""All gateways change to other keys within this time: the test shares its cores with them."""
_PAUSE_S = 0.005
"""Twelve requests with it take less than that."""


def security(*keys: dict[str, Any]) -> dict[str, Any]:
    secrets = {"cache_salt_secret": "0123456789abcdef", "records_secret": "a-secret-of-gateways"}
    return {"api_keys": list(keys), **secrets}


@pytest.fixture(scope="module")
def cluster(server: RedisServer) -> Iterator[Cluster]:
    config = {"redis": PATIENT_REDIS, "security": security(OLD, OPS)}
    with running_cluster(gateways=4, replicas=1, config=config, redis_url=server.url) as cluster:
        yield cluster


@pytest.fixture
async def files(cluster: Cluster, http: httpx.AsyncClient) -> AsyncIterator[list[Path]]:
    """A file of each gateway. They are as before after the test."""
    files = [cluster.state_dir / f"gw{number}.yaml" for number in range(4)]
    before = [file.read_text() for file in files]
    yield files
    for file, text in zip(files, before, strict=True):
        file.write_text(text)
    await eventually(lambda: have_older_keys(http, cluster, []))
    await eventually(lambda: answer(http, cluster, "old", 200))
    await eventually(lambda: answer(http, cluster, "new", 401))


def write(file: Path, *keys: dict[str, Any]) -> None:
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(config | {"security": security(*keys)}))


async def status(http: httpx.AsyncClient, url: str, name: str) -> int:
    headers = {"authorization": f"Bearer {name}-key-0123456789"}
    return (await http.get(f"{url}/v1/models", headers=headers)).status_code


async def answer(http: httpx.AsyncClient, cluster: Cluster, name: str, wanted: int) -> bool:
    """Whether all gateways do so."""
    return {await status(http, url, name) for url in cluster.gateway_urls} == {wanted}


async def have_older_keys(http: httpx.AsyncClient, cluster: Cluster, numbers: list[int]) -> bool:
    """Whether exactly these gateways say that another file is newer."""
    told = [(await http.get(f"{url}/ready")).json().get("has_older_keys", False) for url in cluster.gateway_urls]
    return [number for number, is_older in enumerate(told) if is_older] == numbers


@dataclass
class Asked:
    """The answers to one key, in order: when it was asked, and the status."""

    answers: list[tuple[float, int]] = field(default_factory=list)

    def flaps(self) -> list[tuple[float, int]]:
        """Answers like those of before a change, that long after the change."""
        first = self.answers[0][1]
        changed_s = next((at_s for at_s, status in self.answers if status != first), float("inf"))
        return [(at_s - changed_s, status) for at_s, status in self.answers if status == first and at_s > changed_s]


@asynccontextmanager
async def asked_all_the_time(http: httpx.AsyncClient, urls: list[str], *names: str) -> AsyncIterator[dict[str, Asked]]:
    """Each of the keys is used through one gateway after another."""
    asked = {name: Asked() for name in names}

    async def ask() -> None:
        for url in cycle(urls):
            for name, told in asked.items():
                at_s = time.monotonic()
                told.answers.append((at_s, await status(http, url, name)))
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask())
        yield asked
        asking.cancel()


async def test_while_a_file_is_rolled_out_no_key_is_valid_at_some_gateways_only(
    cluster: Cluster, http: httpx.AsyncClient, files: list[Path]
) -> None:
    async with asked_all_the_time(http, cluster.gateway_urls, "old", "new", "ops") as asked:
        for number, file in enumerate(files):
            write(file, NEW, OPS)
            await eventually(lambda number=number: have_older_keys(http, cluster, [1, 2, 3][number:]))
            await eventually(lambda: answer(http, cluster, "new", 200))
            assert await answer(http, cluster, "old", 401)
    for name, statuses in {"old": {200, 401}, "new": {200, 401}, "ops": {200}}.items():
        assert {status for _, status in asked[name].answers} == statuses
        assert [flap for flap in asked[name].flaps() if flap[0] > _AT_ONCE_S] == [], name


async def test_a_gateway_that_starts_with_a_file_of_before_changes_nothing(
    cluster: Cluster, http: httpx.AsyncClient, files: list[Path]
) -> None:
    for file in files:
        write(file, NEW, OPS)
    await eventually(lambda: have_older_keys(http, cluster, []))
    await eventually(lambda: answer(http, cluster, "old", 401))
    async with another_gateway(cluster, "old", security=security(OLD, OPS)) as late:
        assert [await status(http, late.url, name) for name in ("old", "new", "ops")] == [401, 200, 200]
        assert (await http.get(f"{late.url}/ready")).json()["has_older_keys"] is True
        assert await answer(http, cluster, "new", 200)


async def test_a_gateway_that_starts_with_a_new_file_brings_its_keys(
    cluster: Cluster, http: httpx.AsyncClient, files: list[Path]
) -> None:
    other = api_key("other", "other-key-0123456789")
    async with another_gateway(cluster, "new", security=security(other, OPS)) as first:
        await eventually(lambda: answer(http, cluster, "other", 200), within_s=3)
        assert await answer(http, cluster, "old", 401)
        assert await status(http, first.url, "other") == 200
        assert await have_older_keys(http, cluster, [0, 1, 2, 3])
    write(files[0], OLD, OPS, api_key("more", "more-key-0123456789"))
    await eventually(lambda: answer(http, cluster, "more", 200))
    write(files[0], OLD, OPS)  # taken back, where the newest file was: at once
    await eventually(lambda: answer(http, cluster, "more", 401))
    assert await answer(http, cluster, "old", 200)


async def test_a_mistake_at_one_gateway_is_mended_there_also_when_it_took_the_operators_key(
    cluster: Cluster, http: httpx.AsyncClient, files: list[Path]
) -> None:
    write(files[2], OLD)
    await eventually(lambda: answer(http, cluster, "ops", 401))
    write(files[2], OLD, OPS)
    await eventually(lambda: answer(http, cluster, "ops", 200))


async def test_keys_of_the_newest_file_count_while_redis_is_away_and_come_back_to_an_empty_one(
    cluster: Cluster, http: httpx.AsyncClient, files: list[Path], server: RedisServer
) -> None:
    write(files[0], NEW, OPS)
    await eventually(lambda: answer(http, cluster, "new", 200))
    server.kill()
    try:
        assert await answer(http, cluster, "new", 200)
        assert await answer(http, cluster, "old", 401)
        write(files[1], OLD, NEW, OPS)
        await eventually(lambda: is_valid_at(http, cluster, 1))
    finally:
        server.start()
    await eventually(lambda: answer(http, cluster, "old", 200))
    server.restart_empty()
    async with another_gateway(cluster, "late") as late:  # it has an older file, and knows only what Redis tells
        await eventually(lambda: is_older(http, late.url))
        assert [await status(http, late.url, name) for name in ("old", "new", "ops")] == [200, 200, 200]


async def is_valid_at(http: httpx.AsyncClient, cluster: Cluster, number: int) -> bool:
    return await status(http, cluster.gateway_urls[number], "old") == 200


async def is_older(http: httpx.AsyncClient, url: str) -> bool:
    return bool((await http.get(f"{url}/ready")).json().get("has_older_keys"))
