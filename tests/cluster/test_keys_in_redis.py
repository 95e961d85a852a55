"""API keys that are made, replaced and revoked while four gateways run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, running_cluster
from coordinator.keys import records_key
from gateway.records.record import Signer
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import CHAT, api_key, chat, held_stream, prose
from tests.cluster.gateways import another_gateway
from tests.polling import eventually
from tests.redis_server import RedisServer

REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")
SECRET = "a-secret-of-gateways"
OPS, BOSS = "ops-key-0123456789", "boss-key-0123456789"


CONFIG = {
    "redis": PATIENT_REDIS,
    "policy": {"max_active_requests": 1},
    "security": {
        "api_keys": [
            api_key("ops", OPS, "operations", admin=True),
            api_key("boss", BOSS, "team", manages_keys=True, models=["sim"]),
        ],
        "cache_salt_secret": "0123456789abcdef",
        "records_secret": SECRET,
        "expose_decisions": True,
    },
}


@pytest.fixture(scope="module")
def cluster(server: RedisServer) -> Iterator[Cluster]:
    with running_cluster(
        gateways=4, replicas=1, replica_arguments=REPLICA_ARGUMENTS, config=CONFIG, redis_url=server.url
    ) as cluster:
        yield cluster


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(server.url, protocol=2) as client:
        yield client


def bearer(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}", "content-type": "application/json"}


class Operator:
    """Somebody with a key, at one gateway or another."""

    def __init__(self, http: httpx.AsyncClient, cluster: Cluster, api_key: str) -> None:
        self._http, self._urls, self._headers = http, cluster.gateway_urls, bearer(api_key)

    async def send(self, method: str, path: str, at: int = 0, **body: Any) -> httpx.Response:
        return await self._http.request(
            method, f"{self._urls[at]}{path}", headers=self._headers, json=body if method == "POST" else None
        )

    async def create(self, name: str, at: int = 0, **more: Any) -> dict[str, Any]:
        async def answered() -> httpx.Response | None:
            answer = await self.send("POST", "/v1/keys", at, name=name, **more)
            return answer if answer.status_code != 503 else None  # not connected again, after the test before

        answer = await eventually(answered)
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def revoke(self, key: dict[str, Any], at: int = 0) -> httpx.Response:
        return await self.send("DELETE", f"/v1/keys/{key['id']}", at)


@pytest.fixture
def ops(http: httpx.AsyncClient, cluster: Cluster) -> Operator:
    return Operator(http, cluster, OPS)


@pytest.fixture
def boss(http: httpx.AsyncClient, cluster: Cluster) -> Operator:
    return Operator(http, cluster, BOSS)


async def statuses(http: httpx.AsyncClient, cluster: Cluster, key: dict[str, Any]) -> set[int]:
    """What the gateways answer to the client with this key."""
    asked = [http.get(f"{url}/v1/models", headers=bearer(key["key"])) for url in cluster.gateway_urls]
    return {answer.status_code for answer in await asyncio.gather(*asked)}


async def within_a_second(http: httpx.AsyncClient, cluster: Cluster, key: dict[str, Any], status: int) -> None:
    async def is_everywhere() -> bool:
        return await statuses(http, cluster, key) == {status}

    await eventually(is_everywhere, within_s=1.0)


async def test_a_key_is_valid_and_revoked_at_all_gateways_within_a_second(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator
) -> None:
    key = await ops.create("batch", at=1, tenant="team")
    await within_a_second(http, cluster, key, 200)
    assert (await ops.revoke(key, at=2)).json()["state"] == "revoked"
    await within_a_second(http, cluster, key, 401)
    told = (await ops.send("GET", "/v1/audit", at=3)).json()["entries"]
    assert [(one["who"], one["what"], one["tenant"]) for one in told[:2]] == [
        ("ops", "revoke key", "team"),
        ("ops", "create key", "team"),
    ]


async def test_a_stream_goes_on_when_its_key_is_revoked(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator
) -> None:
    key = await ops.create("streams", tenant="team")
    await within_a_second(http, cluster, key, 200)
    http.headers["authorization"] = f"Bearer {key['key']}"
    async with held_stream(http, cluster.gateway_urls[0], prose("held"), max_tokens=150) as stream:
        await ops.revoke(key, at=1)
        await within_a_second(http, cluster, key, 401)
        assert (await stream.rest()).endswith("data: [DONE]\n\n")


async def test_a_request_that_waits_when_its_key_is_revoked_gets_no_replica(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, store: redis.Redis
) -> None:
    key = await ops.create("waits", tenant="team")
    await within_a_second(http, cluster, key, 200)
    url = cluster.gateway_urls[0]
    other = httpx.AsyncClient(timeout=30, headers=bearer(OPS))
    holding = held_stream(other, url, prose("holds the only replica"))
    async with other, holding as stream, asyncio.TaskGroup() as tasks:
        body = chat(prose("waits"), 1)
        waiting = tasks.create_task(http.post(url + CHAT, json=body, headers=bearer(key["key"])))
        await eventually(lambda: waits(ops))
        await ops.revoke(key)
        await stream.hang_up()
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "waited" in answer.json()["error"]["message"]
    again = await http.post(url + CHAT, json=body, headers=bearer(BOSS))
    assert again.headers["x-kvgate-decision"].startswith("cold"), "the map does not say that its prompt was computed"
    await eventually(lambda: is_idle(store, cluster))


async def waits(ops: Operator) -> bool:
    return any(pool["waiting"] for pool in (await ops.send("GET", "/v1/queue")).json()["pools"])


async def is_idle(store: redis.Redis, cluster: Cluster) -> bool:
    """Whether nothing is reserved any more."""
    return {int(count) for count in await store.hvals(f"kvgate:{{{cluster.pool}}}:active")} <= {0}


async def test_a_key_is_replaced_and_both_are_valid_for_a_while(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator
) -> None:
    old = await ops.create("rotates", tenant="team", models=["sim"])
    new = (await ops.send("POST", f"/v1/keys/{old['id']}/rotate", at=1, overlap_s=4)).json()
    assert (new["name"], new["tenant"], new["models"]) == ("rotates", "team", ["sim"])
    assert new["key"] != old["key"]
    await within_a_second(http, cluster, new, 200)
    assert await statuses(http, cluster, old) == {200}
    await eventually(lambda: is_refused(http, cluster, old))
    assert time.time() * 1000 >= new["replaces"]["expires_ms"]
    assert await statuses(http, cluster, new) == {200}
    again = await ops.send("POST", f"/v1/keys/{old['id']}/rotate")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "key_not_valid")


async def is_refused(http: httpx.AsyncClient, cluster: Cluster, key: dict[str, Any]) -> bool:
    return await statuses(http, cluster, key) == {401}


async def is_served(http: httpx.AsyncClient, cluster: Cluster, key: dict[str, Any]) -> bool:
    return await statuses(http, cluster, key) == {200}


async def test_redis_is_emptied_and_keys_and_revocations_come_back(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, store: redis.Redis, server: RedisServer
) -> None:
    kept, revoked = await ops.create("kept", tenant="team"), await ops.create("revoked", tenant="team")
    await ops.revoke(revoked)
    await within_a_second(http, cluster, kept, 200)
    await within_a_second(http, cluster, revoked, 401)
    server.restart_empty()
    await store.connection_pool.disconnect()
    await eventually(lambda: has(store, kept, revoked))
    assert (await statuses(http, cluster, kept), await statuses(http, cluster, revoked)) == ({200}, {401})
    async with another_gateway(cluster, "gw9") as late:  # it knows only what Redis tells
        answers = [await http.get(f"{late.url}/v1/models", headers=bearer(key["key"])) for key in (kept, revoked)]
    assert [answer.status_code for answer in answers] == [200, 401]


async def has(store: redis.Redis, *keys: dict[str, Any]) -> bool:
    return all([await store.hexists(records_key(), f"key/{key['id']}") for key in keys])


async def test_an_old_backup_undoes_no_revocation(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, store: redis.Redis, server: RedisServer
) -> None:
    key = await ops.create("restored", tenant="team")
    await within_a_second(http, cluster, key, 200)
    with server.going_back_to_now():
        before = await store.hget(records_key(), f"key/{key['id']}")
        await ops.revoke(key)
        await within_a_second(http, cluster, key, 401)
        server.restart_empty()  # with the data of before
        await store.connection_pool.disconnect()

        async def is_newer() -> bool:
            return bool(await store.hget(records_key(), f"key/{key['id']}") != before)

        await eventually(is_newer)
    assert await statuses(http, cluster, key) == {401}


async def test_while_redis_is_away_known_keys_serve_and_a_revocation_counts_where_it_was_made(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, server: RedisServer
) -> None:
    kept, leaked = await ops.create("away", tenant="team"), await ops.create("leaked", tenant="team")
    for key in (kept, leaked):
        await within_a_second(http, cluster, key, 200)
    server.kill()
    try:
        assert await statuses(http, cluster, kept) == {200}
        answer = await http.post(cluster.gateway_urls[0] + CHAT, json=chat("hi", 1), headers=bearer(kept["key"]))
        assert answer.status_code == 200
        refused = await ops.send("POST", "/v1/keys", name="new", tenant="team")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unreachable")
        answer = await ops.revoke(leaked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_yet_everywhere")
        here = await http.get(f"{cluster.gateway_urls[0]}/v1/models", headers=bearer(leaked["key"]))
        assert here.status_code == 401
    finally:
        server.start()
    await eventually(lambda: is_refused(http, cluster, leaked))
    assert await is_served(http, cluster, kept)


async def test_a_gateway_that_starts_without_redis_says_that_it_does_not_know_all_keys(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator
) -> None:
    key = await ops.create("early", tenant="team")
    nobody = {"url": "redis://127.0.0.1:1", "budget_ms": 1000}
    async with another_gateway(cluster, "gw8", redis=nobody) as early:
        answer = await http.get(f"{early.url}/v1/models", headers=bearer(key["key"]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unknown")
        assert (await http.get(f"{early.url}/v1/models", headers=bearer(OPS))).status_code == 200


async def test_a_forged_record_is_ignored_and_named(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, store: redis.Redis
) -> None:
    victim = await ops.create("victim", tenant="team")
    await within_a_second(http, cluster, victim, 200)
    thief = Signer("not-the-gateways-secret", "")
    facts = {"name": "thief", "digest": sha256(b"thief").hexdigest(), "tenant": "team", "admin": True}
    forged = thief.write(f"key/{victim['id']}", 99, facts)
    added = thief.write("key/k-thief", 1, facts)
    await store.hset(records_key(), mapping={forged.field: forged.text, added.field: added.text, "#": "forged"})

    async def is_named_everywhere() -> bool:
        told = [(await http.get(f"{url}/ready")).json() for url in cluster.gateway_urls]
        return all("key/k-thief" in one.get("ignored_records", {}) for one in told)

    await eventually(is_named_everywhere)
    assert await statuses(http, cluster, {"key": "thief"}) == {401}
    assert await statuses(http, cluster, victim) == {200}
    metrics = (await http.get(f"{cluster.gateway_urls[0]}/metrics")).text
    assert "kvgate_ignored_records 0.0" not in metrics
    assert "kvgate_ignored_records " in metrics
    assert (await ops.revoke(victim)).status_code == 200, "its high version holds up no revocation"
    await within_a_second(http, cluster, victim, 401)
    await store.hdel(records_key(), added.field)


async def test_a_tenants_manager_cannot_exceed_itself(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, boss: Operator
) -> None:
    foreign = await ops.create("foreign", tenant="other")
    beyond = [
        ({"tenant": "other"}, "beyond_own_key"),
        ({"admin": True}, "beyond_own_key"),
        ({"models": ["sim", "large"]}, "beyond_own_key"),
    ]
    for fields, code in beyond:
        answer = await boss.send("POST", "/v1/keys", name="more", **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, code), fields
    for method, path in (("DELETE", f"/v1/keys/{foreign['id']}"), ("POST", f"/v1/keys/{foreign['id']}/rotate")):
        assert (await boss.send(method, path)).status_code == 404
    own = await boss.create("own")
    assert (own["tenant"], own["admin"], own["models"]) == ("team", False, ["sim"])
    listed = (await boss.send("GET", "/v1/keys")).json()["keys"]
    assert {one["tenant"] for one in listed} == {"team"}
    assert {one["tenant"] for one in (await boss.send("GET", "/v1/audit")).json()["entries"]} == {"team"}
    for path in ("/v1/replicas", "/v1/queue", "/v1/demand"):
        assert (await boss.send("GET", path)).status_code == 403
    client = Operator(http, cluster, own["key"])
    await within_a_second(http, cluster, own, 200)
    assert (await client.send("GET", "/v1/keys")).status_code == 403


async def test_what_a_revoked_manager_has_made_ends_with_it(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator
) -> None:
    manager = await ops.create("manager", tenant="team", manages_keys=True, expires_days=2)
    await within_a_second(http, cluster, manager, 200)
    stolen = Operator(http, cluster, manager["key"])
    longer = await stolen.send("POST", "/v1/keys", name="longer", expires_days=3)
    assert (longer.status_code, longer.json()["error"]["param"]) == (403, "expires_days")
    child = await stolen.create("child", at=1, manages_keys=True)
    assert child["expires_ms"] == manager["expires_ms"]
    await within_a_second(http, cluster, child, 200)
    grandchild = await Operator(http, cluster, child["key"]).create("grandchild", at=2)
    await within_a_second(http, cluster, grandchild, 200)
    answer = await ops.revoke(manager, at=2)
    assert answer.json()["also_revoked"] == sorted([child["id"], grandchild["id"]])
    for key in (manager, child, grandchild):
        await within_a_second(http, cluster, key, 401)


async def test_a_key_of_some_models_finds_no_others(cluster: Cluster, http: httpx.AsyncClient, ops: Operator) -> None:
    other = await ops.create("limited", tenant="team", models=["nonesuch"])
    sim = await ops.create("unlimited", tenant="team", models=["sim"])
    for key in (other, sim):
        await within_a_second(http, cluster, key, 200)
    url = cluster.gateway_urls[0]

    async def asked(key: dict[str, Any], path: str = CHAT, **body: Any) -> int:
        body = body or chat("hi", 1)
        return (await http.post(url + path, json=body, headers=bearer(key["key"]))).status_code

    without_model = {name: value for name, value in chat("hi", 1).items() if name != "model"}
    assert [await asked(sim), await asked(sim, **without_model)] == [200, 200]
    assert [await asked(other), await asked(other, **without_model)] == [404, 400]
    assert await asked(other, "/v1/route/explain") == 404
    unread = {"model": "sim", "tokens": [1]}
    assert [await asked(key, "/detokenize", **unread) for key in (sim, other)] == [200, 404]
    form = {"file": ("a.wav", b"x", "audio/wav"), "model": (None, "sim")}
    path = "/v1/audio/transcriptions"
    answer = await http.post(url + path, files=form, headers={"authorization": f"Bearer {other['key']}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    named = [await http.get(f"{url}/v1/models/sim", headers=bearer(key["key"])) for key in (sim, other)]
    assert [answer.status_code for answer in named] == [200, 404]
    lists = [await http.get(f"{url}/v1/models", headers=bearer(key["key"])) for key in (sim, other)]
    assert ["sim" in {card["id"] for card in answer.json()["data"]} for answer in lists] == [True, False]


async def test_a_session_of_the_console_ends_with_its_key(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator
) -> None:
    admin = await ops.create("admin", tenant="operations", admin=True)
    await within_a_second(http, cluster, admin, 200)
    url = cluster.gateway_urls[0]
    login = await http.post(f"{url}/console/login", data={"key": admin["key"]})
    assert login.status_code == 303
    cookies = {"cookie": login.headers["set-cookie"].partition(";")[0]}
    assert (await http.get(f"{cluster.gateway_urls[1]}/console", headers=cookies)).status_code == 200
    await ops.revoke(admin)
    await within_a_second(http, cluster, admin, 401)
    assert (await http.get(f"{cluster.gateway_urls[1]}/console", headers=cookies)).status_code == 303


async def test_a_gateway_that_was_paused_for_a_while_undoes_nothing(
    cluster: Cluster, http: httpx.AsyncClient, ops: Operator, store: redis.Redis
) -> None:
    key = await ops.create("paused", tenant="team")
    await within_a_second(http, cluster, key, 200)
    cluster.signal_gateway(3, signal.SIGSTOP)
    try:
        await ops.revoke(key)
    finally:
        cluster.signal_gateway(3, signal.SIGCONT)
    await eventually(lambda: is_refused(http, cluster, key))
    assert b" removed " in (await store.hget(records_key(), f"key/{key['id']}") or b"")
