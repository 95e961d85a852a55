"""Servers that change their role while they run: two gateways, three replicas, under load.

r0 and r1 tell their roles, whatever their labels say. r2 tells none, so its label counts.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica, running_gateways, running_replicas
from tests.cluster.clients import CHAT, Load, chat, prose, records_of, running_load
from tests.cluster.test_pairs import REPLICA_ARGUMENTS, Stage, decision_of
from tests.polling import eventually, wait_until

LABELS = {"r0": "role=decode", "r2": "role=decode"}
ROLES = {"r0": "prefill", "r1": "decode", "r2": "decode"}


@dataclass
class RoleStage(Stage):
    def roles(self) -> list[dict[str, str]]:
        """The roles in force, as each gateway shows them."""
        shown = (httpx.get(f"{url}/ready").json().get("labels", {}) for url in self.cluster.gateway_urls)
        return [{name: each.get(name, {}).get("kvgate.io/role", "both") for name in ROLES} for each in shown]

    def metrics_of(self, replica: str) -> list[list[str]]:
        """The roles that each gateway's metrics name."""
        pages = (httpx.get(f"{url}/metrics").text for url in self.cluster.gateway_urls)
        return [
            re.findall(rf'kvgate_replica_info{{pool="[^"]*",replica="{replica}",role="(.*?)"}} 1.0', page)
            for page in pages
        ]

    def computed(self) -> dict[str, int]:
        """How many references each server has given."""
        return {name: sim.state()["nixl"].get("given", 0) for name, sim in self.replicas.items()}

    async def switch(self, replica: str, role: str) -> None:
        """Has the server change its role, and waits until both gateways have heard."""
        url = f"{self.replicas[replica].url}/v1/pd_role"
        told = (await self.http.get(url)).json()
        asked = {"role": role, "expected_epoch": told["epoch"], "drain_timeout": 30}
        assert (await self.http.post(url, json=asked)).status_code == 202
        await eventually(lambda: [each[replica] for each in self.roles()] == [role] * 2)
        assert self.metrics_of(replica) == [[role]] * 2


@contextmanager
def running(roles: dict[str, str], labels: dict[str, str]) -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    """`roles`: those that servers tell."""
    config: dict[str, Any] = {"redis": {"budget_ms": 500}, "pairs": {"min_tokens": 100}}
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
        running_replicas(Path(folder), 3, REPLICA_ARGUMENTS) as sims,
    ):
        for sim in (each for each in sims if each.id in roles):
            sim.kill()
            sim.arguments = (*REPLICA_ARGUMENTS, "--pd-role", roles[sim.id])
            sim.start()
            sim.wait_until_ready()
        with running_gateways({sim.id: sim.url for sim in sims}, config=config, beside=labels) as cluster:
            yield cluster, {sim.id: sim for sim in sims}


@asynccontextmanager
async def staged(cluster: Cluster, replicas: dict[str, SimReplica]) -> AsyncIterator[RoleStage]:
    async with (
        httpx.AsyncClient(timeout=60) as http,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as store,
    ):
        found = RoleStage(cluster, replicas, store, http)
        wait_until(found.all_ready)
        yield found


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    with running({"r0": "prefill", "r1": "decode"}, LABELS) as found:
        yield found


@pytest.fixture
async def stage(started: tuple[Cluster, dict[str, SimReplica]]) -> AsyncIterator[RoleStage]:
    async with staged(*started) as found:
        await eventually(lambda: found.roles() == [ROLES] * 2)
        yield found


@pytest.mark.slow  # it was seen to fail once in a whole run, with a 503, and in none of 16 runs alone
async def test_without_labels_gateways_learn_the_roles_from_the_servers_that_refuse_requests() -> None:
    with running(ROLES, {}) as started:
        async with staged(*started) as stage:
            for number in range(8):
                answer = await stage.ask("the same short prompt", gateway=number % 2)
                assert answer.status_code == 200, answer.text
                assert decision_of(answer)["prefill"] == "r0"
            await eventually(lambda: stage.roles() == [ROLES] * 2)
            answer = await stage.ask("two answers", n=2)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            await eventually(stage.is_idle)


async def test_a_server_that_tells_decode_gets_only_prompts_that_another_one_has_computed(stage: RoleStage) -> None:
    """It would answer the others with a 500."""
    before = stage.counts("r0")["fetched"]
    for number in range(8):
        short = await stage.ask(f"short {number}", gateway=number % 2)
        several = await stage.ask(prose(f"several {number}"), gateway=number % 2, n=2)
        assert {short.status_code, several.status_code} == {200}
        assert several.headers["x-kvgate-replica"] == "r2"
        if short.headers["x-kvgate-replica"] == "r1":
            assert decision_of(short)["prefill"] == "r0"
    assert stage.counts("r0")["fetched"] > before
    for number in range(8):  # it takes no messages, whoever has computed them
        answer = await stage.ask(prose(f"hello {number}"), gateway=number % 2, path="/v1/messages")
        assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, "r2"), answer.text
    stage.replicas["r0"].fail("error", count=-1)
    failed: set[tuple[str, str]] = set()
    answers = [await stage.ask(prose(f"not computed {number}")) for number in range(8)]
    for answer in answers:
        assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, "r2")
        [record] = await records_of(stage.http, stage.cluster.gateway_urls[0], answer.headers["x-request-id"])
        failed |= {(each["replica"], each["why"]) for each in record["failed"]}
    stage.replicas["r0"].fail("none")
    assert failed == {("r0", "status_500"), ("r1", "no_prefill")}, "r1 was not asked"
    await eventually(stage.is_idle)


async def test_a_request_that_is_sent_for_a_role_of_yesterday_goes_on_at_once(stage: RoleStage) -> None:
    """No gateway has heard yet: the refusal tells."""
    url = f"{stage.replicas['r0'].url}/v1/pd_role"
    for role in ("decode", "prefill"):
        told = (await stage.http.get(url)).json()
        await stage.http.post(url, json={"role": role, "expected_epoch": told["epoch"]})
        answer = await stage.http.post(stage.cluster.gateway_urls[0] + CHAT, json=chat(prose(f"{role} at once")))
        assert answer.status_code == 200, answer.text
        # The other gateway had no request, and hears by a check: one is made each second.
        await eventually(lambda role=role: [each["r0"] for each in stage.roles()] == [role] * 2, within_s=3)
    await eventually(stage.is_idle)


async def test_gateways_follow_servers_that_change_their_roles_under_load_and_no_request_fails(
    stage: RoleStage,
) -> None:
    async with running_load(Load(stage.http, stage.cluster.gateway_urls, max_tokens=(1, 20))) as load:

        async def goes_on() -> None:
            """A fresh prompt, long enough to be computed elsewhere, at each gateway."""
            answered = load.answered
            asked = (stage.ask(prose(f"{answered} {n}"), gateway=n % 2) for n in range(8))
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
            await eventually(lambda: load.answered > answered + 10)

        async def switched(replica: str, role: str, *prefills: str) -> None:
            """Afterwards, these servers compute prompts for others."""
            await stage.switch(replica, role)
            before = stage.computed()

            async def follow() -> bool:
                await goes_on()
                return {name for name, given in stage.computed().items() if given > before[name]} == set(prefills)

            await eventually(follow)

        await goes_on()
        await switched("r0", "decode")
        await switched("r1", "prefill", "r1")
        await switched("r0", "prefill", "r0", "r1")
        # Its server starts again, and tells no role. Without a label, it does both.
        sim = stage.replicas["r1"]
        sim.kill()
        sim.arguments = REPLICA_ARGUMENTS
        sim.start()
        await eventually(lambda: [each["r1"] for each in stage.roles()] == ["both"] * 2)
        await goes_on()
    assert (load.failures, load.broken) == ([], 0)
    assert stage.counts()["late"] == 0
    assert stage.computed()["r1"] == 0
    await eventually(stage.is_idle)
    assert set(await stage.store.hkeys(stage.breakers)) <= {"r1"}
