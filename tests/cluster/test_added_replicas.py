"""Replicas come and go by API and CLI, at four gateways."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis
import yaml

from bench.cluster import Cluster, SimReplica, running_cluster
from coordinator.keys import audit_key, records_key
from gateway.ops.local.ports import free_ports
from gateway.records.record import Signer
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import Load, api_key, ask, held_stream, prose, running_load
from tests.cluster.gateways import another_gateway, kvgate
from tests.cluster.servers import another_server
from tests.polling import eventually
from tests.redis_server import running_redis

SECRET, OPS = "0123456789abcdef-of-records", "ops-key-0123456789"
KEYS = [
    api_key("ops", OPS, "ops", admin=True),
    api_key("team", "team-key-0123456789"),
]
SECURITY = {"api_keys": KEYS, "cache_salt_secret": "0123456789abcdef"}
CONFIG = {"redis": PATIENT_REDIS, "security": SECURITY | {"records_secret": SECRET, "expose_decisions": True}}
WITHIN_S = 1.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    arguments = ("--speed", "5", "--decode-s-per-token", "0.1")
    with running_cluster(gateways=4, replicas=2, replica_arguments=arguments, config=CONFIG) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """An admin. What it has added is removed at the end."""
    async with httpx.AsyncClient(timeout=30, headers={"authorization": f"Bearer {OPS}"}) as client:
        yield client
        for name in {each["id"] for each in await listed(client, cluster) if each["source"] == "added"}:
            await client.delete(f"{cluster.gateway_urls[0]}/v1/replicas/{name}")
        await eventually(lambda: all_use(client, cluster, {"r0", "r1"}))


@pytest.fixture
async def server(http: httpx.AsyncClient, tmp_path: Path) -> AsyncIterator[SimReplica]:
    """A vLLM that no gateway knows."""
    async with another_server(http, tmp_path, "--speed", "5", "--decode-s-per-token", "0.1") as server:
        yield server


async def listed(http: httpx.AsyncClient, cluster: Cluster, gateway: int = 0) -> list[dict[str, Any]]:
    answer = (await http.get(f"{cluster.gateway_urls[gateway]}/v1/replicas")).json()
    return [*answer["replicas"], *answer["unused"]]


async def add(http: httpx.AsyncClient, cluster: Cluster, name: str, url: str, **more: Any) -> httpx.Response:
    return await http.post(f"{cluster.gateway_urls[0]}/v1/replicas", json={"id": name, "url": url, **more})


async def ready(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    body: dict[str, Any] = (await http.get(f"{url}/ready")).json()
    return body


async def all_use(http: httpx.AsyncClient, cluster: Cluster, replicas: set[str]) -> bool:
    """Whether these are ready at all gateways, and no others."""
    return all([set((await ready(http, url))["replicas"]) == replicas for url in cluster.gateway_urls])


async def test_an_added_replica_is_used_by_all_within_a_second_and_removed_without_an_error(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica
) -> None:
    async with running_load(Load(http, cluster.gateway_urls)) as load, AsyncExitStack() as streams:
        added = await add(http, cluster, "r5", server.url, labels={"version": "v2"})
        assert added.json() == {
            "id": "r5",
            "url": server.url,
            "dp_rank": None,
            "labels": {"version": "v2"},
            "source": "added",
        }
        await eventually(lambda: all_use(http, cluster, {"r0", "r1", "r5"}), within_s=WITHIN_S)
        for gateway, url in enumerate(cluster.gateway_urls):
            body = await ready(http, url)
            assert (body["sources"], body["labels"]) == ({"r5": "added"}, {"r5": {"version": "v2"}})
            [row] = [each for each in await listed(http, cluster, gateway) if each["id"] == "r5"]
            assert (row["state"], row["source"], row["url"]) == ("ready", "added", server.url)
        held = [await stream_on(http, streams, url, "r5") for url in cluster.gateway_urls]

        removed = await http.delete(f"{cluster.gateway_urls[1]}/v1/replicas/r5")
        assert (removed.status_code, removed.json()["state"]) == (200, "draining")
        await eventually(lambda: all_use(http, cluster, {"r0", "r1"}), within_s=WITHIN_S)
        seen = server.state()["requests"]
        answered = load.answered
        for stream in held:
            assert (await stream.rest()).endswith("data: [DONE]\n\n")
        await eventually(lambda: load.answered > answered + 20)
        assert server.state()["requests"] == seen, "it gets nothing new"
        assert "r5" not in {each["id"] for n in range(4) for each in await listed(http, cluster, n)}
    assert (load.failures, load.broken) == ([], 0)


async def stream_on(http: httpx.AsyncClient, streams: AsyncExitStack, url: str, replica: str) -> Any:
    """A stream through this gateway that this replica answers."""
    for number in range(100):
        stream = await streams.enter_async_context(held_stream(http, url, prose(f"{url} {number}"), max_tokens=60))
        if stream.replica == replica:
            return stream
    raise AssertionError(f"{replica} gets nothing through {url}")


async def test_a_replica_gets_nothing_before_it_answers_its_first_health_check(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    server = SimReplica("late", free_ports(1)[0], ("--speed", "0"), tmp_path / "late.log")
    try:
        assert (await add(http, cluster, "late", server.url)).status_code == 200
        await eventually(lambda: is_told(http, cluster, "late"))
        assert {(await ask(http, cluster.gateway_urls[n % 4], prose(n))).status_code for n in range(20)} == {200}
        server.start()
        await eventually(lambda: all_use(http, cluster, {"r0", "r1", "late"}))
        await eventually(lambda: gets_requests(http, cluster, "late"))
    finally:
        server.kill()


async def is_told(http: httpx.AsyncClient, cluster: Cluster, replica: str) -> bool:
    """Whether every gateway says why it does not use the replica."""
    return all([replica in (await ready(http, url)).get("not_ready", {}) for url in cluster.gateway_urls])


async def gets_requests(http: httpx.AsyncClient, cluster: Cluster, replica: str) -> bool:
    """Whether each gateway sends some of ten new prompts there."""
    for url in cluster.gateway_urls:
        answers = [await ask(http, url, prose(time.monotonic())) for _ in range(10)]
        if replica not in {answer.headers["x-kvgate-replica"] for answer in answers}:
            return False
    return True


async def test_an_emptied_redis_gets_the_replicas_back_and_a_new_gateway_knows_them(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica
) -> None:
    await add(http, cluster, "r6", server.url)
    await eventually(lambda: all_use(http, cluster, {"r0", "r1", "r6"}))
    async with redis.Redis.from_url(cluster.redis_url) as client:
        await client.flushall()
        await eventually(lambda: client.exists(records_key()))
    await eventually(lambda: all_use(http, cluster, {"r0", "r1", "r6"}))
    async with another_gateway(cluster, "new") as gateway:
        assert "r6" in (await ready(http, gateway.url))["replicas"]


async def test_who_can_write_to_redis_adds_no_replica(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica
) -> None:
    facts = {"id": "evil", "url": server.url}
    forged = Signer("another-secret-0123456789", "").write("replica/1", 1, facts)
    await add(http, cluster, "r8", "http://127.0.0.1:1")
    await eventually(lambda: is_told(http, cluster, "r8"))
    async with redis.Redis.from_url(cluster.redis_url) as client:
        [(good, text)] = [
            (field, text)
            for field, text in (await client.hgetall(records_key())).items()
            if field.startswith(b"replica/") and b" live " in text
        ]
        moved = text.replace(b"http://127.0.0.1:1", server.url.encode())
        await client.hset(records_key(), mapping={"replica/1": forged.text, "replica/2": moved, good: moved, "#": "x"})
        await eventually(lambda: is_good_again(client, good, moved))
        assert await is_told(http, cluster, "r8")
        for url in cluster.gateway_urls:
            body = await ready(http, url)
            assert (set(body["sources"]), set(body["replicas"])) == ({"r8"}, {"r0", "r1"})
        assert {each["url"] for each in await listed(http, cluster) if each["source"] == "added"} == {
            "http://127.0.0.1:1"
        }
        await client.hdel(records_key(), "replica/1", "replica/2")
    assert server.state()["requests"] == 0


async def is_good_again(client: redis.Redis, field: bytes, forged: bytes) -> bool:
    """Whether a gateway has put its record in the place of the forged one."""
    return bool(await client.hget(records_key(), field) != forged)


async def test_of_an_id_that_the_configuration_lists_the_listed_replica_is_used_and_that_is_told(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica
) -> None:
    refused = await add(http, cluster, "r0", server.url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "replica_exists")
    assert "r0 comes from configuration" in refused.json()["error"]["message"]
    other_id = await add(http, cluster, "r9", cluster.replicas[0].url)
    assert (other_id.status_code, "is r0 already" in other_id.text) == (409, True)
    not_added = await http.delete(f"{cluster.gateway_urls[0]}/v1/replicas/r0")
    assert (not_added.status_code, not_added.json()["error"]["code"]) == (409, "replica_not_added")

    await add(http, cluster, "r9", "http://127.0.0.1:1")
    files = [cluster.state_dir / f"gw{number}.yaml" for number in range(4)]
    before = [file.read_text() for file in files]
    try:
        for file, text in zip(files, before, strict=True):
            config = yaml.safe_load(text)
            config["replicas"].append({"id": "r9", "url": server.url})
            file.write_text(yaml.safe_dump(config))
        await eventually(lambda: all_use(http, cluster, {"r0", "r1", "r9"}))
        for url in cluster.gateway_urls:
            body = await ready(http, url)
            assert body["added_not_used"] == {"r9": "r9 comes from configuration already"}
        rows = [each for each in await listed(http, cluster) if each["id"] == "r9"]
        assert [(each["source"], each["url"]) for each in rows] == [
            ("configuration", server.url),
            ("added", "http://127.0.0.1:1"),
        ]
        removed = await http.delete(f"{cluster.gateway_urls[0]}/v1/replicas/r9")
        assert (removed.status_code, removed.json()["state"]) == (200, "unknown"), "the listed one is not drained"
        assert "r9" in (await ready(http, cluster.gateway_urls[0]))["replicas"]
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    await eventually(lambda: all_use(http, cluster, {"r0", "r1"}))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"id": "r9"}, "url"),
        ({"id": "R 5", "url": "http://a:1"}, "id"),
        ({"id": "r9", "url": "ftp://a:1"}, "url"),
        ({"id": "r9", "url": "http://user:secret@a:1"}, "url"),
        ({"id": "r9", "url": "http://a:1", "labels": {"version": 2}}, "labels.version"),
        ({"id": "r9", "url": "http://a:1", "weight": 2}, "weight"),
        ({"id": "r9", "url": "http://a:1/" + "x" * 5000}, "url"),
    ],
)
async def test_a_wrong_field_is_named_and_no_secret_is_repeated(
    cluster: Cluster, http: httpx.AsyncClient, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(f"{cluster.gateway_urls[0]}/v1/replicas", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert "secret" not in answer.text


async def test_only_admins_change_the_replicas(cluster: Cluster, http: httpx.AsyncClient) -> None:
    team = {"authorization": "Bearer team-key-0123456789"}
    url = f"{cluster.gateway_urls[0]}/v1/replicas"
    answers = [
        await http.post(url, json={"id": "r5", "url": "http://127.0.0.1:1"}, headers=team),
        await http.delete(f"{url}/r0", headers=team),
        await http.post(url, content=b"{}", headers={"content-type": "text/plain"}),
        await http.delete(f"{url}/nobody"),
        await http.post(url, json=["r5"]),
        await http.post(url, json={"id": "x" * 20_000}),
    ]
    assert [answer.status_code for answer in answers] == [403, 403, 415, 404, 400, 413]


async def test_the_command_adds_lists_and_removes_and_adds_again(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica
) -> None:
    added = await replicas(cluster, "add", "r7", server.url, "--label", "version=v2")
    assert added == (0, "r7 is added; it gets requests when it answers: kvgate replicas list\n")
    await eventually(lambda: all_use(http, cluster, {"r0", "r1", "r7"}))
    code, text = await replicas(cluster, "list")
    assert code == 0
    [row] = [line.split() for line in text.splitlines() if line.startswith("r7")]
    assert (row[1], row[4:]) == ("ready", ["kvgate", "replicas", "add", "version=v2", server.url])
    code, text = await replicas(cluster, "remove", "r7", "--wait")
    assert (code, text.splitlines()[-1]) == (0, "r7 is removed")
    await eventually(lambda: all_use(http, cluster, {"r0", "r1"}))
    await replicas(cluster, "add", "r7", server.url)
    await eventually(lambda: all_use(http, cluster, {"r0", "r1", "r7"}))
    await eventually(lambda: gets_requests(http, cluster, "r7"))
    async with redis.Redis.from_url(cluster.redis_url, decode_responses=True) as client:
        told = [fields for _, fields in await client.xrange(audit_key()) if fields["subject"] == f"r7 {server.url}"]
    assert [(each["who"], each["what"]) for each in told] == [
        ("ops", "add replica"),
        ("ops", "remove replica"),
        ("ops", "add replica"),
    ]
    code, text = await replicas(cluster, "remove", "r0")
    assert (code, "comes from configuration: remove it there" in text) == (1, True)
    code, text = await replicas(cluster, "remove", "r9")
    assert (code, "was not added; kvgate replicas list lists all" in text) == (1, True)


async def replicas(cluster: Cluster, *words: str) -> tuple[int, str]:
    """Runs `kvgate replicas` as an admin. Returns its exit code, and its output with its errors."""
    return await kvgate("replicas", *words, "--gateway", cluster.gateway_urls[0], "--api-key", OPS)


async def test_while_redis_is_away_a_removal_counts_at_once_here_and_for_all_when_it_is_back(
    cluster: Cluster, http: httpx.AsyncClient, server: SimReplica
) -> None:
    with running_redis() as own:
        address = {"redis": PATIENT_REDIS | {"url": own.url}}
        async with another_gateway(cluster, "a", **address) as a, another_gateway(cluster, "b", **address) as b:
            added = await http.post(f"{a.url}/v1/replicas", json={"id": "r3", "url": server.url})
            assert added.status_code == 200
            await eventually(lambda: uses(http, b.url, "r3"))
            own.pause()
            refused = await http.post(f"{a.url}/v1/replicas", json={"id": "r2", "url": "http://127.0.0.1:1"})
            removed = await http.delete(f"{a.url}/v1/replicas/r3")
            assert (refused.status_code, removed.status_code) == (503, 503)
            assert "look when Redis is back" in refused.json()["error"]["message"]
            assert "tells the others" in removed.json()["error"]["message"]
            await eventually(lambda: uses_not(http, a.url, "r3"))
            assert await uses(http, b.url, "r3")
            own.resume()
            await eventually(lambda: uses_not(http, b.url, "r3"))


async def uses(http: httpx.AsyncClient, url: str, replica: str) -> bool:
    return replica in (await ready(http, url))["replicas"]


async def uses_not(http: httpx.AsyncClient, url: str, replica: str) -> bool:
    return not await uses(http, url, replica)


async def test_without_the_secret_it_refuses_and_says_how_to_set_it(cluster: Cluster, http: httpx.AsyncClient) -> None:
    await add(http, cluster, "r4", "http://127.0.0.1:1")
    async with another_gateway(cluster, "bare", security=SECURITY) as gateway:
        answers = [
            await http.post(f"{gateway.url}/v1/replicas", json={"id": "r6", "url": "http://127.0.0.1:2"}),
            await http.delete(f"{gateway.url}/v1/replicas/r4"),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "records_secret_missing")
            assert "docs/how-to/rotate-a-key.md" in answer.json()["error"]["message"]
            assert "KVGATE_RECORDS_SECRET" in answer.json()["error"]["message"]
        assert "sources" not in await ready(http, gateway.url), "it reads none"
