"""Two clusters with the same ids on one Redis. Namespaces separate them; without namespaces the conflict is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from bench.cluster import Cluster, SimReplica, running_cluster, running_replicas
from gateway.ops.local.ports import free_ports
from tests.api.stage import running_agent
from tests.cluster.clients import ask, prose
from tests.cluster.gateways import GatewayProcess, started_gateway
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

SPEED = ("--speed", "20")
CONFIG: dict[str, Any] = {"redis": {"budget_ms": 500}, "health": {"timeout_s": 5}}
BLOCK_TOKENS = 16
KVGATE = (sys.executable, "-P", "-m", "gateway.ops.cli")


def started(stack: ExitStack, server: RedisServer, namespace: str = "", events: bool = True) -> Cluster:
    config = CONFIG | {"redis": {"budget_ms": 500, "namespace": namespace}}
    return stack.enter_context(
        running_cluster(replica_arguments=SPEED, config=config, redis_url=server.url, events=events)
    )


async def wrong_predictions(http: httpx.AsyncClient, cluster: Cluster, name: str) -> list[str]:
    """Sends prompts twice, through one gateway and then through the other. Returns the second answers whose cached
    tokens were not as predicted: fewer, or more than the next boundary allows."""
    wrong = []
    for n in range(8):
        for url in cluster.gateway_urls:
            answer = await ask(http, url, prose(f"{name} {n}", 200))
            assert answer.status_code == 200, answer.text
            assert "state=exact" in answer.headers["x-kvgate-decision"]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        matched = int(answer.headers["x-kvgate-matched-tokens"])
        boundary = int(answer.headers["x-kvgate-next-boundary-tokens"])
        if not matched - BLOCK_TOKENS <= cached <= boundary + BLOCK_TOKENS:
            wrong.append(f"{cached} cached, {matched} foretold: {answer.headers['x-kvgate-decision']}")
    return wrong


def addresses(client: Any, cluster: Cluster, prefix: str = "kvgate") -> dict[str, str]:
    """The replicas' addresses in Redis."""
    records = client.hgetall(f"{prefix}:{{{cluster.pool}}}:replicas")
    return {replica: text.split(" ")[-1] for replica, text in records.items()}


@pytest.mark.slow
async def test_clusters_with_namespaces_of_their_own_do_not_meet(http: httpx.AsyncClient) -> None:
    names = ("team-a", "team-b")
    with ExitStack() as stack:
        shared = stack.enter_context(running_redis())
        client = stack.enter_context(redis.Redis.from_url(shared.url, decode_responses=True, protocol=2))
        clusters = {name: started(stack, shared, name) for name in names}
        for turn in range(2):
            for name, cluster in clusters.items():
                assert await wrong_predictions(http, cluster, f"{name} {turn}") == []
        for name, cluster in clusters.items():
            assert addresses(client, cluster, f"kvgate:{name}") == {sim.id: sim.url for sim in cluster.replicas}
        outside = {key for key in client.scan_iter("*") if not key.startswith(("kvgate:team-a:", "kvgate:team-b:"))}
        assert outside <= {"kvgate:watcher"}


@dataclass
class Newcomer:
    """A cluster that never becomes healthy, so no fixture waits for it."""

    replicas: list[SimReplica]
    gateways: list[GatewayProcess]
    agent_logs: list[Path]


@asynccontextmanager
async def newcomer(folder: Path, server: RedisServer, events: bool) -> AsyncIterator[Newcomer]:
    """Two gateways and three replicas, with the same replica ids as the first cluster."""
    arguments = SPEED if events else (*SPEED, "--no-events")
    async with AsyncExitStack() as stack:
        sims = stack.enter_context(running_replicas(folder, 3, arguments))
        for sim in sims if events else ():
            stack.enter_context(running_agent(folder, server.url, sim))
        gateways = []
        for name in ("new0", "new1"):
            network = {"id": name, "host": "127.0.0.1", "port": free_ports(1)[0]}
            network["redis"] = CONFIG["redis"] | {"url": server.url}
            config = CONFIG | network | {"replicas": [{"id": sim.id, "url": sim.url} for sim in sims]}
            gateways.append(await stack.enter_async_context(started_gateway(folder, config)))
        yield Newcomer(sims, gateways, [folder / f"agent-{sim.id}.log" for sim in sims])


async def taken_ids(http: httpx.AsyncClient, url: str) -> dict[str, str]:
    try:
        ready = await http.get(f"{url}/ready")
    except httpx.TransportError:
        return {}  # the gateway has only just started
    taken: dict[str, str] = ready.json().get("taken_ids", {})
    assert ready.status_code == 200 or not taken
    return taken


async def tells_of_all(http: httpx.AsyncClient, gateway: GatewayProcess) -> bool:
    return set(await taken_ids(http, gateway.url)) == {"r0", "r1", "r2"}


async def tells_of_none(http: httpx.AsyncClient, gateway: GatewayProcess) -> bool:
    ready = (await http.get(f"{gateway.url}/ready")).json()
    return "taken_ids" not in ready and ready["replicas"] == ["r0", "r1", "r2"]


def says(log: Path, text: str) -> bool:
    return text in log.read_text()


def doctor(*options: str) -> set[tuple[str, str]]:
    command = [*KVGATE, "doctor", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return {(finding["code"], finding["subject"]) for finding in json.loads(done.stdout)["findings"]}


@pytest.mark.slow
@pytest.mark.parametrize("events", [True, False], ids=["followed", "unfollowed"])
async def test_of_clusters_without_namespaces_the_first_keeps_its_ids_and_the_second_says_so(
    http: httpx.AsyncClient, tmp_path: Path, events: bool
) -> None:
    with ExitStack() as stack:
        shared = stack.enter_context(running_redis())
        client = stack.enter_context(redis.Redis.from_url(shared.url, decode_responses=True, protocol=2))
        first = started(stack, shared, events=events)
        at_first = {sim.id: sim.url for sim in first.replicas}
        async with newcomer(tmp_path, shared, events) as second:
            for gateway in second.gateways:
                await eventually(lambda g=gateway: tells_of_all(http, g), within_s=30)  # type: ignore[misc]
                for part in (second.replicas[0].url, at_first["r0"], "redis.namespace"):
                    assert says(gateway.log, part)
            assert addresses(client, first) == at_first
            before = client.hgetall(f"kvgate:{{{first.pool}}}:replicas")
            if events:
                assert await wrong_predictions(http, first, "first") == []
                for log in second.agent_logs:
                    await eventually(lambda log=log: says(log, "another engine lives under this id"))  # type: ignore[misc]
            await it_serves_by_hashing(http, second)
            assert client.hgetall(f"kvgate:{{{first.pool}}}:replicas") == before
            for url in first.gateway_urls:
                assert await taken_ids(http, url) == {}
            taken = {("replica-id-taken", f"replica {replica}") for replica in at_first}
            assert taken <= doctor("--redis-url", shared.url, "--gateway", second.gateways[0].url)
            file = tmp_path / "doctor.yaml"
            replicas = [{"id": sim.id, "url": sim.url} for sim in second.replicas]
            file.write_text(yaml.safe_dump({"redis": {"url": shared.url}, "replicas": replicas}))
            assert taken <= doctor("--config", str(file))
            stack.close()  # stops the first cluster and Redis; the gateways take the ids over one after the other
            answers = [await ask(http, gateway.url, prose("later", 200)) for gateway in second.gateways]
            assert [answer.status_code for answer in answers] == [200, 200]


async def it_serves_by_hashing(http: httpx.AsyncClient, cluster: Newcomer) -> None:
    """The cluster's gateways choose the same replica for a prompt, and predict nothing."""
    for n in range(8):
        answers = [await ask(http, gateway.url, prose(f"second {n}", 200)) for gateway in cluster.gateways]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all("state=fallback" in answer.headers["x-kvgate-decision"] for answer in answers)
        assert len({answer.headers["x-kvgate-replica"] for answer in answers}) == 1
        assert answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.slow
async def test_the_ids_are_the_second_clusters_once_the_first_is_gone(http: httpx.AsyncClient, tmp_path: Path) -> None:
    with running_redis() as shared, ExitStack() as stack:
        started(stack, shared)
        async with newcomer(tmp_path, shared, events=True) as second:
            for gateway in second.gateways:
                await eventually(lambda g=gateway: tells_of_all(http, g), within_s=30)  # type: ignore[misc]
            stack.close()
            for gateway in second.gateways:
                await eventually(lambda g=gateway: tells_of_none(http, g), within_s=30)  # type: ignore[misc]
            answer = await eventually_exact(http, second)
            assert "state=exact" in answer.headers["x-kvgate-decision"]


async def eventually_exact(http: httpx.AsyncClient, cluster: Newcomer) -> httpx.Response:
    async def is_exact() -> bool:
        ready = (await http.get(f"{cluster.gateways[0].url}/ready")).json()
        return bool(ready["exact"] == ["r0", "r1", "r2"])

    await eventually(is_exact, within_s=20)
    return await ask(http, cluster.gateways[0].url, prose("third", 200))
