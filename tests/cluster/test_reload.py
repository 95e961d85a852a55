"""Four gateways follow one configuration file while they run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.cluster import Cluster, running_cluster
from gateway.settings.config_file import merged
from gateway.settings.gateway_settings import build_settings
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import CHAT, api_key, chat, held_stream, prose
from tests.cluster.gateways import another_gateway, configured_like, kvgate
from tests.cluster.servers import another_server
from tests.gateway.replicas.discovery.dns_server import running_dns
from tests.polling import eventually

REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")


def configured(*keys: dict[str, Any], **sections: Any) -> dict[str, Any]:
    security = {"api_keys": list(keys), "cache_salt_secret": "0123456789abcdef", "expose_decisions": True}
    return {"redis": PATIENT_REDIS, "security": security, **sections}


OLD, OPS = api_key("old", "old-key-0123456789"), api_key("ops", "ops-key-0123456789", admin=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        gateways=4, replicas=3, replica_arguments=REPLICA_ARGUMENTS, config=configured(OLD, OPS)
    ) as cluster:
        yield cluster


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
        replace_by_link(file, configured(OLD, api_key("new", "new-key-0123456789"), OPS))
        await eventually(lambda: are(http, cluster, "new-key-0123456789", 200))
        assert await are(http, cluster, "old-key-0123456789", 200), "both are valid meanwhile"
        replace_by_link(file, configured(api_key("new", "new-key-0123456789"), OPS))
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
        ("a: " + "[" * 600, "not YAML"),
        (yaml.safe_dump(configured(OLD | {"sha256": "abc"})), "security.api_keys[0].sha256"),
        (yaml.safe_dump(configured(OLD, OPS, tenants=[{"name": "team", "priority": "vip"}])), "tenants"),
    ],
)
async def test_a_bad_file_changes_nothing_and_says_where_it_is_wrong(
    cluster: Cluster, http: httpx.AsyncClient, file: Path, text: str, field: str
) -> None:
    async def nobody_tells() -> bool:
        return await told(http, cluster, "config_problems") == [None] * 4

    before = write(file, text)
    await eventually(lambda: tells(http, cluster, "config_problems", field))
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
    await eventually(lambda: are(http, cluster, "ops-key-0123456789", 401))


@pytest.mark.parametrize(("account", "per_min"), [("team", 1000), ("key:old", 2000)])
async def test_a_raised_limit_lets_queued_requests_go(
    cluster: Cluster, http: httpx.AsyncClient, file: Path, account: str, per_min: int
) -> None:
    def limited(concurrency: int) -> dict[str, Any]:
        limits = {"limits": {"concurrency": concurrency, "requests_per_min": per_min}}
        if account == "team":
            return configured(OLD, OPS, tenants=[{"name": "team", **limits}])
        return configured(OLD | limits, OPS)

    async def queued(accounts: int) -> bool:
        found = await http.get(f"{url}/v1/queue", headers={"authorization": "Bearer ops-key-0123456789"})
        return found.text.count(f'"tenant":"{account}"') == accounts

    url = cluster.gateway_urls[0]
    http.headers["authorization"] = "Bearer old-key-0123456789"
    write(file, limited(1))
    await eventually(lambda: are_limited(http, cluster, per_min))
    async with held_stream(http, url, prose("long"), max_tokens=4000) as stream:
        waiting = asyncio.ensure_future(http.post(url + CHAT, json=chat(prose("queued"), 2)))
        await eventually(lambda: queued(1))
        write(file, limited(2))
        assert (await waiting).status_code == 200
        assert await stream.goes_on(), "it was not waited for"


async def are_limited(http: httpx.AsyncClient, cluster: Cluster, per_min: int) -> bool:
    """Whether all gateways have read the limits with so many requests a minute."""
    answers = [await http.post(url + CHAT, json=chat("hi", 1)) for url in cluster.gateway_urls]
    return {answer.headers.get("x-ratelimit-limit-requests") for answer in answers} == {str(per_min)}


async def test_limits_are_raised_under_load(cluster: Cluster, http: httpx.AsyncClient, file: Path) -> None:
    def limited(in_flight: int) -> dict[str, Any]:
        return configured(OLD, OPS, limits={"max_in_flight": in_flight})

    async def answers(status: int) -> bool:
        answer = await http.post(url + CHAT, json=chat("hi", 1))
        return answer.status_code == status

    url = cluster.gateway_urls[0]
    http.headers["authorization"] = "Bearer old-key-0123456789"
    async with held_stream(http, url, prose("long"), max_tokens=4000) as stream:
        write(file, limited(1))
        await eventually(lambda: answers(429))
        assert await stream.goes_on(), "a lower limit takes nothing from a request that runs"
        write(file, limited(2))
        await eventually(lambda: answers(200))
        assert await stream.goes_on()


async def test_a_raised_number_of_requests_at_a_replica_lets_queued_ones_go(
    cluster: Cluster, http: httpx.AsyncClient, file: Path
) -> None:
    def limited(active: int) -> dict[str, Any]:
        return configured(OLD, OPS, policy={"max_active_requests": active})

    async def is_queued() -> bool:
        found = await http.get(f"{url}/v1/queue", headers={"authorization": "Bearer ops-key-0123456789"})
        return '"tenant":"team"' in found.text

    url = cluster.gateway_urls[0]
    http.headers["authorization"] = "Bearer old-key-0123456789"
    write(file, limited(1))
    await eventually(lambda: are_configured(http, cluster, "policy", {"max_active_requests": 1}))
    async with AsyncExitStack() as streams:
        held = [
            await streams.enter_async_context(held_stream(http, url, prose(f"long {n}"), max_tokens=4000))
            for n in range(3)
        ]
        waiting = asyncio.ensure_future(http.post(url + CHAT, json=chat(prose("queued"), 2)))
        await eventually(is_queued)
        write(file, limited(2))
        assert (await waiting).status_code == 200
        assert all([await stream.goes_on() for stream in held]), "it was not waited for"


async def test_a_source_of_replicas_is_added_and_removed(
    cluster: Cluster, http: httpx.AsyncClient, file: Path, tmp_path: Path
) -> None:
    async def know(replicas: set[str]) -> bool:
        return all([await serves(http, url, replicas) for url in cluster.gateway_urls])

    listed = set((await http.get(f"{cluster.gateway_urls[0]}/ready")).json()["replicas"])
    async with running_dns() as dns, another_server(http, tmp_path) as server:
        dns.records["vllm.test."] = ["A 127.0.0.1"]
        found = {"names": ["vllm.test"], "port": server.port, "server": dns.address, "labels": {"version": "v2"}}
        write(file, configured(OLD, OPS, discovery={"dns": found}))
        await eventually(lambda: know(listed | {f"127.0.0.1-{server.port}"}))
        assert await told(http, cluster, "labels") == [{f"127.0.0.1-{server.port}": {"version": "v2"}}] * 4
        dns.fault = "servfail"
        write(file, configured(OLD, OPS, discovery={"dns": found | {"names": ["other.test"]}}))
        await eventually(lambda: are_configured(http, cluster, "discovery", {"dns": found | {"names": ["other.test"]}}))
        assert await know(listed | {f"127.0.0.1-{server.port}"}), "the new source has not answered yet"
        write(file, configured(OLD, OPS))
        await eventually(lambda: know(listed))


async def test_the_log_and_its_level_change(
    cluster: Cluster, http: httpx.AsyncClient, file: Path, tmp_path: Path
) -> None:
    def lines() -> int:
        return len(log.read_bytes().splitlines()) if log.exists() else 0

    log, gateway_log = tmp_path / "access.log", cluster.state_dir / "logs" / "gw0.log"
    write(file, configured(OLD, OPS, log={"access_log": str(log)}))
    await eventually(log.exists)
    await eventually(lambda: has_lines(http, cluster, lines))
    log.rename(tmp_path / "access.log.1")
    await eventually(lambda: has_lines(http, cluster, lines))
    write(file, configured(OLD, OPS, log={"access_log": str(tmp_path / "gone" / "x.log")}))
    await eventually(lambda: tells(http, cluster, "config_problems", "log.access_log"))
    write(file, configured(OLD, OPS, log={"level": "error"}))
    await eventually(lambda: tells(http, cluster, "config_problems", "None"))
    before = gateway_log.read_text()
    write(file, configured(OLD, OPS, log={"level": "error"}, limits={"max_in_flight": 9}))
    await eventually(lambda: are_configured(http, cluster, "limits", {"max_in_flight": 9}))
    write(file, "limits: [")
    await eventually(lambda: tells(http, cluster, "config_problems", "line 1"))
    assert "configuration read again" not in gateway_log.read_text().removeprefix(before)
    assert "configuration not used" in gateway_log.read_text().removeprefix(before)


async def has_lines(http: httpx.AsyncClient, cluster: Cluster, lines: Callable[[], int]) -> bool:
    """Whether a request through each gateway leaves lines."""
    await are(http, cluster, "old-key-0123456789", 200)
    return lines() > 0


async def test_what_check_config_would_warn_of_is_logged(cluster: Cluster, http: httpx.AsyncClient, file: Path) -> None:
    write(file, configured(OLD, OPS, queue={"max_waiting": 10, "max_waiting_per_tenant": 20}))
    log = cluster.state_dir / "logs" / "gw0.log"
    await eventually(lambda: "doubtful configuration" in log.read_text())


async def test_of_two_reloads_that_contradict_each_other_each_is_whole_and_the_doctor_names_it(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    """Half of the gateways get one file, the others another one. Of one of them, the keys count at all gateways."""
    files = [cluster.state_dir / f"gw{number}.yaml" for number in range(4)]
    before = [file.read_text() for file in files]
    a, b = api_key("a", "first-key-0123456789"), api_key("b", "second-key-0123456789")
    security = (await fingerprints(http, cluster))[0]["security"]
    try:
        for number, file in enumerate(files):
            own = configured(a, OPS, retries={"max_attempts": 2}) if number < 2 else configured(b, OPS)
            file.write_text(yaml.safe_dump(merged(yaml.safe_load(before[number]), own)))

        async def newest() -> str:
            """Whose keys count."""
            older = [bool(each) for each in await told(http, cluster, "has_older_keys")]
            name = {(True, True, False, False): "second", (False, False, True, True): "first"}.get(tuple(older), "")
            return name if name and await are(http, cluster, f"{name}-key-0123456789", 200) else ""

        async def have_read() -> bool:
            return security not in {each["security"] for each in await fingerprints(http, cluster)}

        keys = {"first", "second"}
        await eventually(have_read)
        counts = await eventually(newest)
        for _ in range(10):
            assert await are(http, cluster, f"{counts}-key-0123456789", 200), "a key flaps"
            assert await are(http, cluster, f"{(keys - {counts}).pop()}-key-0123456789", 401), "a key flaps"
        attempts = [each["retries"] for each in await fingerprints(http, cluster)]
        assert attempts[0] == attempts[1] != attempts[2] == attempts[3], "each has its own file whole"
        found = await findings(cluster)
        assert settings_that_differ(found) == {"security", "retries"}
        assert [each["code"] for each in found].count("gateway-keys-older") == 2
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    await eventually(lambda: are(http, cluster, "old-key-0123456789", 200))
    assert settings_that_differ(await findings(cluster)) == set()


async def findings(cluster: Cluster) -> list[dict[str, Any]]:
    """What the doctor says of the gateways."""
    gateways = [word for url in cluster.gateway_urls for word in ("--gateway", url)]
    redis = ("--redis-url", cluster.redis_url, "--api-key", "ops-key-0123456789", "--json")
    _, told = await kvgate("doctor", *redis, *gateways)
    found: list[dict[str, Any]] = json.loads(told)["findings"]
    return found


def settings_that_differ(found: list[dict[str, Any]]) -> set[str]:
    """The sections that the doctor names."""
    return {each["what"].split("`")[1] for each in found if each["code"] == "gateway-settings-differ"}


async def fingerprints(http: httpx.AsyncClient, cluster: Cluster) -> list[dict[str, str]]:
    """The digest of each section, of every gateway."""
    admin = {"authorization": "Bearer ops-key-0123456789"}
    return [(await http.get(f"{url}/version", headers=admin)).json()["settings"] for url in cluster.gateway_urls]


async def are_configured(http: httpx.AsyncClient, cluster: Cluster, section: str, fields: dict[str, Any]) -> bool:
    """Whether all gateways have taken the section."""
    wanted = build_settings({section: fields}, {}).fingerprint()[section]
    return {each[section] for each in await fingerprints(http, cluster)} == {wanted}


async def tells(http: httpx.AsyncClient, cluster: Cluster, field: str, text: str) -> bool:
    """Whether every gateway's /ready has this text there."""
    return all(text in str(each) for each in await told(http, cluster, field))


async def test_what_needs_a_restart_is_named_and_the_rest_is_used(
    cluster: Cluster, http: httpx.AsyncClient, file: Path
) -> None:
    new = api_key("new", "new-key-0123456789")
    write(file, configured(OLD, new, OPS, queue={"default_band": "batch"}, log={"format": "console"}))
    await eventually(lambda: are(http, cluster, "new-key-0123456789", 200))
    assert await told(http, cluster, "needs_a_restart") == [["queue.default_band", "log.format"]] * 4


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
