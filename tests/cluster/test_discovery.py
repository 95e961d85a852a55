"""Gateways find replicas by themselves: by DNS, and in Kubernetes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis
from aiohttp import web

from bench.cluster import Cluster, SimReplica
from coordinator.keys import pool_slug
from coordinator.registry import ReplicaRecord
from tests.cluster.clients import Load, ask, held_stream, running_load
from tests.cluster.gateways import GatewayProcess, another_gateway, configured_like, started_gateway
from tests.cluster.ledger import Ledger
from tests.cluster.places import Place, running_place
from tests.cluster.servers import another_server
from tests.cluster.test_foreign_servers import ForeignServer, listening
from tests.polling import eventually

pytestmark = pytest.mark.slow

MODEL = "kvgate/found"


@pytest.fixture(params=["dns", "kubernetes"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    async with running_place(request.param, tmp_path) as place:
        yield place


@pytest.fixture
async def servers(http: httpx.AsyncClient, tmp_path: Path) -> AsyncIterator[list[SimReplica]]:
    async with AsyncExitStack() as stack:
        arguments = ("--model", MODEL, "--speed", "20")
        yield [await stack.enter_async_context(another_server(http, tmp_path, *arguments)) for _ in range(3)]


@pytest.fixture
async def ledger(cluster: Cluster) -> AsyncIterator[Ledger]:
    async with redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client:
        ledger = Ledger(client, pool_slug(MODEL))
        await ledger.forget_everything()
        yield ledger


@asynccontextmanager
async def finder(cluster: Cluster, name: str, place: Place) -> AsyncIterator[GatewayProcess]:
    """A gateway that only knows where to look for replicas."""
    async with another_gateway(cluster, name, replicas=[], discovery=place.discovery) as gateway:
        yield gateway


async def ready(http: httpx.AsyncClient, gateway: GatewayProcess) -> set[str]:
    """The replicas that the gateway uses."""
    return set((await http.get(f"{gateway.url}/ready")).json()["replicas"])


async def use(http: httpx.AsyncClient, gateways: Sequence[GatewayProcess], replicas: set[str]) -> None:
    """Wait until each gateway uses exactly these replicas."""
    for gateway in gateways:
        await eventually(lambda gateway=gateway: _uses(http, gateway, replicas))


async def _uses(http: httpx.AsyncClient, gateway: GatewayProcess, replicas: set[str]) -> bool:
    return await ready(http, gateway) == replicas


async def test_replicas_come_go_and_come_back_under_load_and_nothing_is_lost(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, servers: list[SimReplica]
) -> None:
    ids = [place.id_of(server) for server in servers]
    await place.hold(servers[:2])
    async with finder(cluster, "a", place) as a, finder(cluster, "b", place) as b:
        both = (a, b)
        await use(http, both, set(ids[:2]))
        async with running_load(Load(http, [a.url, b.url])) as load:
            await place.hold(servers)
            await use(http, both, set(ids))
            await eventually(lambda: servers[2].state()["requests"] > 5)
            await place.hold(servers[1:])
            await use(http, both, set(ids[1:]))
            await eventually(lambda: servers[0].state()["running"] == 0)
            seen = servers[0].state()["requests"], servers[1].state()["requests"]
            await eventually(lambda: servers[1].state()["requests"] > seen[1] + 20)
            assert servers[0].state()["requests"] == seen[0]
            servers[0].kill()
            servers[0].start()
            servers[0].wait_until_ready()
            await place.hold(servers)
            await use(http, both, set(ids))
            await eventually(lambda: servers[0].state()["requests"] > 5)
        assert (load.failures, load.broken) == ([], 0)
        assert load.answered > 50
        await eventually(lambda: are_zero(ledger))
        assert (await ledger.sums()).problems() == []
        assert set(await ledger.replicas()) == set(ids)


async def are_zero(ledger: Ledger) -> bool:
    return (await ledger.sums()).are_zero


async def test_while_nobody_can_tell_the_replicas_found_last_are_used(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, servers: list[SimReplica]
) -> None:
    ids = [place.id_of(server) for server in servers]
    await place.hold(servers[:2])
    async with finder(cluster, "a", place) as gateway:
        async with running_load(Load(http, [gateway.url])) as load:
            await place.fail()
            await eventually(lambda: metric(http, gateway, "kvgate_discovery_up", 0))
            await place.hold(servers[1:])
            answered = load.answered
            await eventually(lambda: load.answered > answered + 30)
            assert await ready(http, gateway) == set(ids[:2])
            place.mend()
            await use(http, [gateway], set(ids[1:]))
            assert await metric(http, gateway, "kvgate_discovery_up", 1)
            shown = (await http.get(f"{gateway.url}/metrics")).text
            assert [f'kvgate_replica_ready{{replica="{each}"}}' in shown for each in ids[:2]] == [False, True]
        assert (load.failures, load.broken) == ([], 0)
        assert "replicas cannot be looked up; those found last stay" in gateway.log.read_text()


async def metric(http: httpx.AsyncClient, gateway: GatewayProcess, name: str, value: int) -> bool:
    lines = (await http.get(f"{gateway.url}/metrics")).text.splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")] == [value]


async def test_a_stream_goes_on_where_it_is_when_its_replica_leaves(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, tmp_path: Path
) -> None:
    async with another_server(
        http, tmp_path, "--model", MODEL, "--speed", "5", "--decode-s-per-token", "0.1"
    ) as server:
        await place.hold([server])
        async with (
            finder(cluster, "a", place) as gateway,
            held_stream(http, gateway.url, "hello", max_tokens=100) as stream,
        ):
            await place.hold([])
            await use(http, [gateway], set())
            refused = await ask(http, gateway.url, "hello")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
            assert (await stream.rest()).endswith("data: [DONE]\n\n")


async def test_gateways_that_are_told_different_things_leave_each_others_replicas_alone(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, servers: list[SimReplica], tmp_path: Path
) -> None:
    """One gateway's source lists a replica, the other's does not; either may do the pool's maintenance. The registry
    keeps replicas that answer."""
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(running_place("dns", tmp_path)) for _ in range(2)]
        ids = {places[0].id_of(server) for server in servers}
        for place in places:
            await place.hold(servers)
        a, b = [await stack.enter_async_context(finder(cluster, f"g{n}", each)) for n, each in enumerate(places)]
        await use(http, [a, b], ids)
        standing = await ledger.replicas()
        for apart, other in ((0, 1), (1, 0)):
            await places[apart].hold(servers[:1])
            await use(http, [(a, b)[apart]], {places[0].id_of(servers[0])})
            async with running_load(Load(http, [a.url, b.url])) as load:
                seen: list[dict[str, ReplicaRecord]] = []
                for _ in range(30):
                    seen.append(await ledger.replicas())
                    await asyncio.sleep(0.1)  # three seconds in all, to see that nothing changes
            assert all(look == standing for look in seen)
            assert (load.failures, load.broken) == ([], 0)
            assert await ready(http, (a, b)[other]) == ids
            await places[apart].hold(servers)
            await use(http, [a, b], ids)


async def test_a_gateway_started_while_nobody_can_tell_says_so_and_serves_as_soon_as_somebody_can(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, servers: list[SimReplica]
) -> None:
    await place.fail()
    config = configured_like(cluster, "a", replicas=[], discovery=place.discovery)
    async with started_gateway(cluster.state_dir, config) as gateway:
        said = await eventually(lambda: unreadiness(http, gateway))
        assert any(reason.startswith(("dns ", "kubernetes vllm: the API server answered 503")) for reason in said)
        await place.hold(servers)
        place.mend()
        await use(http, [gateway], {place.id_of(server) for server in servers})
        assert (await ask(http, gateway.url, "hello")).status_code == 200


async def unreadiness(http: httpx.AsyncClient, gateway: GatewayProcess) -> list[str]:
    try:
        answer = await http.get(f"{gateway.url}/ready")
    except httpx.TransportError:
        return []
    reasons: list[str] = answer.json()["reasons"]
    return reasons if answer.status_code == 503 else []


async def test_a_replica_that_is_listed_and_found_is_one_and_goes_by_its_listed_name(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, servers: list[SimReplica]
) -> None:
    await place.hold(servers[:2])
    listed = [{"id": "listed", "url": servers[0].url}]
    async with another_gateway(cluster, "a", replicas=listed, discovery=place.discovery) as gateway:
        await use(http, [gateway], {"listed", place.id_of(servers[1])})
        await place.hold([])
        await use(http, [gateway], {"listed"})


@contextmanager
def agent(cluster: Cluster, replica: str, server: SimReplica, log: Path) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "gateway.ops.cli", "agent", "--replica", replica, "--url", server.url]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--redis-url", cluster.redis_url], stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)


async def test_an_agent_follows_a_found_replica_by_the_id_that_gateways_gave_it(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, servers: list[SimReplica], tmp_path: Path
) -> None:
    found = place.id_of(servers[0])
    await place.hold(servers[:1])
    with agent(cluster, found, servers[0], tmp_path / "agent.log"):
        async with finder(cluster, "a", place) as gateway:
            await eventually(lambda: is_exact(http, gateway, found))
            assert set(await ledger.replicas()) == {found}


async def is_exact(http: httpx.AsyncClient, gateway: GatewayProcess, replica: str) -> bool:
    return replica in (await http.get(f"{gateway.url}/ready")).json()["exact"]


async def test_an_agent_that_calls_a_found_replica_by_another_id_doubles_nothing_and_is_told_the_right_one(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, place: Place, servers: list[SimReplica], tmp_path: Path
) -> None:
    found = place.id_of(servers[0])
    await place.hold(servers[:1])
    async with finder(cluster, "a", place) as gateway:
        with agent(cluster, "called-otherwise", servers[0], tmp_path / "agent.log"):
            hint = f"it may be {found}: its agent must be given that id"
            await eventually(lambda: hint in gateway.log.read_text())
            async with running_load(Load(http, [gateway.url])) as load:
                await eventually(lambda: load.answered > 30)
            assert await ready(http, gateway) == {found}
            assert "called-otherwise" not in (await ledger.sums()).counted
            assert load.failures == []


async def test_a_replica_that_has_gone_is_asked_after_less_often(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger, tmp_path: Path
) -> None:
    async with (
        running_place("dns", tmp_path) as place,
        listening(stays := CountedServer("stays"), stays.health),
        listening(goes := CountedServer("goes"), goes.health),
    ):
        both = [SimReplica(each.name, port_of(each), (), tmp_path / "none") for each in (stays, goes)]
        await place.hold(both)
        async with finder(cluster, "a", place) as gateway:
            await use(http, [gateway], {place.id_of(each) for each in both})
            stays.is_ill = goes.is_ill = True
            await place.hold(both[:1])
            await use(http, [gateway], set())
            await eventually(lambda: goes.asked > 5)
            before = stays.asked, goes.asked
            await eventually(lambda: stays.asked >= before[0] + 15)
            assert goes.asked <= before[1] + 4


class CountedServer(ForeignServer):
    """It counts its health checks."""

    asked = 0
    is_ill = False

    async def health(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=500 if self.is_ill else 200)


def port_of(server: ForeignServer) -> int:
    return int(server.url.rpartition(":")[2])
