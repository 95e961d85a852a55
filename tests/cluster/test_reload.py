"""Four gateways follow one configuration file while they run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.cluster import Cluster, running_cluster
from gateway.settings.gateway_settings import build_settings
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import CHAT, chat, held_stream, prose
from tests.cluster.gateways import another_gateway, configured_like
from tests.polling import eventually

REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")


def key(name: str, text: str, tenant: str = "team") -> dict[str, Any]:
    return {"name": name, "tenant": tenant, "sha256": sha256(text.encode()).hexdigest()}


def configured(*keys: dict[str, Any], **sections: Any) -> dict[str, Any]:
    security = {"api_keys": list(keys), "cache_salt_secret": "0123456789abcdef", "expose_decisions": True}
    return {"redis": PATIENT_REDIS, "security": security, **sections}


OLD, OPS = key("old", "old-key-0123456789"), key("ops", "ops-key-0123456789") | {"admin": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        gateways=4, replicas=3, replica_arguments=REPLICA_ARGUMENTS, config=configured(OLD, OPS)
    ) as cluster:
        yield cluster


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


@pytest.fixture
def file(cluster: Cluster) -> Iterator[Path]:
    """The file that all gateways follow. It is as before after the test."""
    file = cluster.state_dir / "base.yaml"
    before = file.read_text()
    yield file
    file.write_text(before)


def write(file: Path, config: dict[str, Any] | str) -> str:
    """Overwrites the file. Returns what was there."""
    before = file.read_text()
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return before


def replace_by_link(file: Path, config: dict[str, Any]) -> None:
    """Swaps a link, as Kubernetes does with a ConfigMap: nobody sees half a file."""
    told = file.with_name(f"told-{os.urandom(4).hex()}")
    told.write_text(yaml.safe_dump(config))
    link = file.with_name("link")
    link.symlink_to(told)
    link.replace(file)


async def statuses(http: httpx.AsyncClient, cluster: Cluster, api_key: str) -> set[int]:
    """What the gateways answer to a small request with this key."""
    headers = {"authorization": f"Bearer {api_key}"}
    asked = [await http.post(url + CHAT, json=chat("hi", 1), headers=headers) for url in cluster.gateway_urls]
    return {answer.status_code for answer in asked}


async def told(http: httpx.AsyncClient, cluster: Cluster, field: str) -> list[Any]:
    """A field of every gateway's /ready."""
    return [(await http.get(f"{url}/ready")).json().get(field) for url in cluster.gateway_urls]


async def are(http: httpx.AsyncClient, cluster: Cluster, api_key: str, status: int) -> bool:
    return await statuses(http, cluster, api_key) == {status}


async def gauges(http: httpx.AsyncClient, cluster: Cluster) -> list[float]:
    """Whether each gateway says that it uses its file."""
    pages = [(await http.get(f"{url}/metrics")).text for url in cluster.gateway_urls]
    name = "kvgate_config_last_reload_successful "
    return [float(line.removeprefix(name)) for page in pages for line in page.splitlines() if line.startswith(name)]


async def test_a_key_is_rotated_on_every_gateway_in_the_middle_of_its_streams(
    cluster: Cluster, http: httpx.AsyncClient, file: Path
) -> None:
    http.headers["authorization"] = "Bearer old-key-0123456789"
    async with held_stream(http, cluster.gateway_urls[0], prose("held"), max_tokens=150) as stream:
        replace_by_link(file, configured(OLD, key("new", "new-key-0123456789"), OPS))
        await eventually(lambda: are(http, cluster, "new-key-0123456789", 200))
        assert await are(http, cluster, "old-key-0123456789", 200), "both are valid meanwhile"
        replace_by_link(file, configured(key("new", "new-key-0123456789"), OPS))
        await eventually(lambda: are(http, cluster, "old-key-0123456789", 401))
        assert await are(http, cluster, "new-key-0123456789", 200)
        assert (await stream.rest()).endswith("data: [DONE]\n\n")


async def test_a_tenants_limits_change_live(cluster: Cluster, http: httpx.AsyncClient, file: Path) -> None:
    limits = {"name": "team", "limits": {"requests_per_min": 1}}
    write(file, configured(OLD, OPS, tenants=[limits]))
    await eventually(lambda: are(http, cluster, "old-key-0123456789", 429))
    write(file, configured(OLD, OPS))
    await eventually(lambda: are(http, cluster, "old-key-0123456789", 200))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("security: [", "line 1, column 12"),
        ("", "empty"),
        ("security: {replica_api_key: *secret}", "line 1, column 29"),
        ("a: !!int ''", "not YAML"),
        ("a: " + "[" * 3000, "not YAML"),
        (yaml.safe_dump(configured(OLD | {"sha256": "abc"})), "security.api_keys[0].sha256"),
        (yaml.safe_dump(configured(OLD, OPS, tenants=[{"name": "team", "priority": "vip"}])), "tenants"),
    ],
)
async def test_a_bad_file_changes_nothing_and_says_where_it_is_wrong(
    cluster: Cluster, http: httpx.AsyncClient, file: Path, text: str, field: str
) -> None:
    async def all_tell() -> bool:
        return all(field in str(each) for each in await told(http, cluster, "config_problems"))

    async def nobody_tells() -> bool:
        return await told(http, cluster, "config_problems") == [None] * 4

    before = write(file, text)
    await eventually(all_tell)
    assert await gauges(http, cluster) == [0] * 4
    assert "secret" not in str(await told(http, cluster, "config_problems"))
    assert await are(http, cluster, "old-key-0123456789", 200)
    write(file, before)
    await eventually(nobody_tells)
    assert await gauges(http, cluster) == [1] * 4


async def test_a_removed_admin_key_watches_no_longer(cluster: Cluster, http: httpx.AsyncClient, file: Path) -> None:
    headers = {"authorization": "Bearer ops-key-0123456789"}
    async with http.stream("GET", f"{cluster.gateway_urls[0]}/v1/decisions", headers=headers) as watched:
        pieces = watched.aiter_bytes()
        await anext(pieces)
        write(file, configured(OLD))
        async for _ in pieces:  # ends by itself
            pass
    assert await are(http, cluster, "ops-key-0123456789", 401)


async def test_a_raised_limit_lets_queued_requests_go(cluster: Cluster, http: httpx.AsyncClient, file: Path) -> None:
    def limited(concurrency: int) -> dict[str, Any]:
        return configured(OLD, OPS, tenants=[{"name": "team", "limits": {"concurrency": concurrency}}])

    async def queued(tenants: int) -> bool:
        found = await http.get(f"{url}/v1/queue", headers={"authorization": "Bearer ops-key-0123456789"})
        return found.text.count('"tenant":"team"') == tenants

    url = cluster.gateway_urls[0]
    http.headers["authorization"] = "Bearer old-key-0123456789"
    write(file, limited(1))
    await eventually(lambda: are_limited(http, cluster))
    async with held_stream(http, url, prose("long"), max_tokens=4000) as stream:
        waiting = asyncio.ensure_future(http.post(url + CHAT, json=chat(prose("queued"), 2)))
        await eventually(lambda: queued(1))
        write(file, limited(2))
        assert (await waiting).status_code == 200
        assert await stream.goes_on(), "it was not waited for"


async def are_limited(http: httpx.AsyncClient, cluster: Cluster) -> bool:
    """Whether all gateways have read the tenant's limit."""
    admin = {"authorization": "Bearer ops-key-0123456789"}
    pages = [(await http.get(f"{url}/version", headers=admin)).json() for url in cluster.gateway_urls]
    return len({page["settings"]["tenants"] for page in pages}) == 1 and pages[0]["settings"]["tenants"] != _NO_TENANTS


_NO_TENANTS = build_settings({}, {}).fingerprint()["tenants"]


async def test_what_needs_a_restart_is_named_and_the_rest_is_used(
    cluster: Cluster, http: httpx.AsyncClient, file: Path
) -> None:
    new = key("new", "new-key-0123456789")
    write(file, configured(OLD, new, OPS, queue={"wait_s": 7}, log={"level": "debug"}))
    await eventually(lambda: are(http, cluster, "new-key-0123456789", 200))
    assert await told(http, cluster, "needs_a_restart") == [["queue.wait_s", "log.level"]] * 4


async def test_listed_replicas_come_and_go_at_a_hang_up_signal(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """A replica that is listed no more finishes what it has."""
    config = configured_like(cluster, "own")
    async with another_gateway(cluster, "own", port=config["port"]) as gateway:
        http.headers["authorization"] = "Bearer ops-key-0123456789"
        file = gateway.log.with_suffix(".yaml")
        async with held_stream(http, gateway.url, prose("at its replica"), max_tokens=100) as stream:
            gone = next(each for each in config["replicas"] if each["id"] == stream.replica)
            others = [each for each in config["replicas"] if each is not gone]
            write(file, config | {"replicas": others})
            gateway.signal(signal.SIGHUP)
            await eventually(lambda: serves(http, gateway.url, {each["id"] for each in others}))
            assert (await stream.rest()).endswith("data: [DONE]\n\n")
        write(file, config)
        gateway.signal(signal.SIGHUP)
        await eventually(lambda: serves(http, gateway.url, {each["id"] for each in config["replicas"]}))


async def serves(http: httpx.AsyncClient, url: str, replicas: set[str]) -> bool:
    return set((await http.get(f"{url}/ready")).json()["replicas"]) == replicas
