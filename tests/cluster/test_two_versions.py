"""A rolling upgrade: gateways of the version before and of this one share one Redis and one fleet, under load.

The older version is taken from this repository's history. There are more replicas than a placement looks at, so both
place from orders.
"""

from __future__ import annotations

import asyncio
import io
import random
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis
import yaml

from bench.cluster import KVGATE, SimReplica
from bench.fleet.gateways import GatewayProcess
from bench.fleet.replicas import light_replicas
from bench.fleet.settings import LightSettings
from bench.processes import running
from coordinator.keys import PoolKeys, pool_slug
from gateway.ops.local.ports import free_ports
from tests.cluster.ledger import Ledger
from tests.polling import eventually
from tests.programs import needs, older_version
from tests.redis_server import running_redis

pytestmark = needs("the version before")
ROOT = Path(__file__).parent.parent.parent
REPLICAS = 20
SETTINGS = LightSettings(num_blocks=4096, prefill_tokens_per_s=200_000.0, decode_s_per_token=0.002)
DOCUMENTS = ["".join(f"document {number} says {word}. " for word in range(60)) for number in range(8)]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The older version's packages."""
    folder = tmp_path_factory.mktemp("older")
    archive = subprocess.run(older_version("gateway", "coordinator"), capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder)  # our own files
    return folder


def kvgate_of(packages: Path) -> tuple[str, ...]:
    """The command that runs the code of these packages. This version's is forked (tests/forked.py)."""
    return KVGATE if packages == ROOT else ("env", f"PYTHONPATH={packages}", *KVGATE)


@dataclass
class Stage:
    """A Redis, and replicas with agents of this version."""

    folder: Path
    redis_url: str
    replica_urls: dict[str, str]
    client: redis.Redis
    http: httpx.AsyncClient

    @property
    def keys(self) -> PoolKeys:
        return PoolKeys(pool_slug(SETTINGS.model))

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.client, self.keys.pool)

    @contextmanager
    def gateway(self, name: str, packages: Path = ROOT, replicas: int = REPLICAS) -> Iterator[GatewayProcess]:
        """A gateway that runs the code of these packages, and is ready."""
        (port,) = free_ports(1)
        file, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
        listed = [{"id": replica, "url": url} for replica, url in self.replica_urls.items()]
        redis_section = {"url": self.redis_url, "budget_ms": 500}
        health = {"timeout_s": 5}
        file.write_text(
            yaml.safe_dump(
                {"id": name, "host": "127.0.0.1", "port": port, "redis": redis_section, "replicas": listed}
                | {"health": health}
            )
        )
        command = (*kvgate_of(packages), "gateway", "--config", str(file))
        with log.open("wb") as output, running(command, output) as process:
            gateway = GatewayProcess(f"http://127.0.0.1:{port}", process, log)
            gateway.wait_until_ready(replicas)
            yield gateway

    async def ask(self, url: str, document: str, question: int, stream: bool) -> str:
        """The replica that answered."""
        text = f"{document} Question {question}?"
        body: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 16}
        answer = await self.http.post(f"{url}/v1/chat/completions", json=body | {"stream": stream})
        assert answer.status_code == 200, answer.text
        assert not stream or "data: [DONE]" in answer.text
        return answer.headers["x-kvgate-replica"]

    async def load(self, urls: list[str], seed: int, count: int = 100) -> None:
        """Requests about a few documents, through these gateways at random."""
        dice, at_once = random.Random(seed), asyncio.Semaphore(12)

        async def one(number: int) -> None:
            async with at_once:
                await self.ask(dice.choice(urls), dice.choice(DOCUMENTS), number, dice.random() < 0.5)

        await asyncio.gather(*(one(seed * 1000 + number) for number in range(count)))

    async def residents(self) -> int:
        """How many records of the map say that a replica holds a key."""
        keys = {key async for key in self.client.scan_iter(self.keys.own("*"))}  # SCAN may return one twice
        records = [record for key in keys for record in (await self.client.hgetall(key)).values()]
        return sum(" resident " in record for record in records)

    async def has_more_residents(self, before: int) -> bool:
        return await self.residents() > before

    async def has_agent(self, replica: str) -> bool:
        """Whether an agent has the lease on the replica now."""
        record, (seconds, _) = await self.client.hget(self.keys.agents, replica), await self.client.time()
        return record is not None and int(record.split(" ")[2]) >= seconds * 1000

    async def nothing_is_in_flight(self) -> bool:
        sums = await self.ledger.sums()
        return sums.are_zero and not sums.problems()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    with (
        running_redis() as server,
        light_replicas(REPLICAS, SETTINGS, server.url) as fleet,
    ):
        async with (
            redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client,
            httpx.AsyncClient(timeout=60) as http,
        ):
            yield Stage(tmp_path, server.url, fleet.urls, client, http)


async def test_an_upgrade_loses_no_request_and_no_count(stage: Stage, older: Path) -> None:
    with stage.gateway("old", older) as old:
        await stage.load([old.url], seed=1)
        with stage.gateway("new") as new:
            both = [old.url, new.url]
            await stage.load(both, seed=2)
            assert len(await stage.client.hgetall(stage.keys.subsets_of)) == REPLICAS
            for number, document in enumerate(DOCUMENTS):
                # Only one replica holds what nobody has asked before.
                urls = [*both, *both] if number % 2 else [*both[::-1], *both[::-1]]
                answered = {await stage.ask(url, f"New: {document}", 0, stream=False) for url in urls}
                assert len(answered) == 1, "what one gateway has placed, the other finds"
            await eventually(stage.nothing_is_in_flight)
            assert await stage.ledger.ownership_problems() == []
            old.process.terminate()
            await stage.load([new.url], seed=3)
            await eventually(stage.nothing_is_in_flight)
            assert await stage.ledger.ownership_problems() == []


@contextmanager
def agent_of(packages: Path, sim: SimReplica, redis_url: str, folder: Path) -> Iterator[None]:
    """An agent that runs the code of these packages, until it is told to stop."""
    options = ("--replica", sim.id, "--url", sim.url, "--redis-url", redis_url)
    with (folder / "agent.log").open("ab") as log, running((*kvgate_of(packages), "agent", *options), log) as process:
        yield
        process.terminate()
        process.wait(30)


async def test_agents_of_both_versions_keep_the_map_of_both_versions_true(tmp_path: Path, older: Path) -> None:
    sim = SimReplica("r0", free_ports(1)[0], ("--speed", "0"), tmp_path / "r0.log")
    with running_redis() as server, ExitStack() as stack:
        stack.callback(sim.kill)
        sim.start()
        sim.wait_until_ready()
        http = httpx.AsyncClient(timeout=60)
        client = redis.Redis.from_url(server.url, decode_responses=True, protocol=2)
        stage = Stage(tmp_path, server.url, {sim.id: sim.url}, client, http)
        said = 0

        async def is_told(url: str) -> None:
            """A prompt that is asked for through this gateway becomes resident in the map."""
            nonlocal said
            said += 1
            before = await stage.residents()
            await stage.ask(url, f"{said}: {DOCUMENTS[said % 8]}", said, stream=False)
            await eventually(lambda: stage.has_more_residents(before))

        new = stack.enter_context(stage.gateway("new", replicas=0))
        for packages in (older, ROOT, older):
            with agent_of(packages, sim, server.url, tmp_path):
                await eventually(lambda: stage.has_agent("r0"))
                await is_told(new.url)
                await is_told(new.url)
        old = stack.enter_context(stage.gateway("old", older, replicas=0))
        new.process.terminate()
        with agent_of(ROOT, sim, server.url, tmp_path):
            await eventually(lambda: stage.has_agent("r0"))
            await is_told(old.url)
        await client.aclose()
        await http.aclose()
