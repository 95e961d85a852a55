"""When a replica dies silently or hangs, another replica answers the requests that have no byte of their answer yet."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis.asyncio as redis

from bench.cluster import SimReplica
from bench.faults.proxy import Proxy
from coordinator.keys import pool_slug
from gateway.tasks import Tasks
from tests.chaos.stage import CONFIG, Stage
from tests.cluster.clients import ask, held_stream, is_complete
from tests.cluster.gateways import another_gateway
from tests.cluster.ledger import Ledger
from tests.cluster.servers import another_server
from tests.polling import eventually

PATIENT: dict[str, Any] = {
    "timeouts": {**CONFIG["timeouts"], "first_byte_s": 60},
    "health": {"hang_s": 1},
}
"""The configuration of a gateway that waits for an answer longer than any test lasts."""
MOVES_WITHIN_S = 1.25
COUNT = 6


class Requests:
    """Plain and streamed requests for prompts that one replica holds, through their own gateway."""

    def __init__(self, stage: Stage, url: str, texts: list[str], tasks: Tasks) -> None:
        self._stage = stage
        self._url = url
        self._answers = [
            tasks.spawn(ask(stage.http, url, text, stream=number % 2 == 1), "ask") for number, text in enumerate(texts)
        ]

    async def were_answered_by(self) -> set[str]:
        """The replicas that answered, once all requests are answered."""
        answers = await asyncio.gather(*self._answers)
        assert all(is_complete(each) for each in answers), [each.text for each in answers]
        return {each.headers["x-kvgate-replica"] for each in answers}

    async def moved(self, *whys: str) -> float:
        return sum([await self._stage.metric(self._url, "kvgate_retries_total", reason=why) for why in whys])


@asynccontextmanager
async def link_to(replica: SimReplica) -> AsyncIterator[Proxy]:
    """A link to the replica that a test can break."""
    link = Proxy("127.0.0.1", urlsplit(replica.url).port or 0)
    await link.start()
    try:
        yield link
    finally:
        await link.close()


async def held_by(stage: Stage, replica: SimReplica) -> list[str]:
    """Prompts that this replica holds. This takes long while the replica is busy, because other replicas get the
    prompts."""
    return [(await stage.warm_prompt(on=replica.id))[0] for _ in range(COUNT)]


@asynccontextmanager
async def asked(stage: Stage, url: str, replica: SimReplica, texts: list[str], **fault: Any) -> AsyncIterator[Requests]:
    """Freezes the replica or gives it the fault, then sends requests for prompts that it holds."""
    tasks = Tasks()
    if fault:
        await stage.fail(replica, **fault)
    else:
        replica.signal(signal.SIGSTOP)
    try:
        yield Requests(stage, url, texts, tasks)
    finally:
        await tasks.close()


async def are(stage: Stage, states: dict[str, str]) -> bool:
    """Whether the registry has the replicas in these states."""
    return await are_in(stage.ledger, states)


async def are_in(ledger: Ledger, states: dict[str, str]) -> bool:
    return {name: record.state for name, record in (await ledger.replicas()).items()} == states


async def knows(stage: Stage, url: str, replicas: set[str]) -> bool:
    """Whether the gateway has found all of them ready."""
    return set((await stage.http.get(f"{url}/ready")).json()["replicas"]) == replicas


async def test_what_waits_for_a_replica_that_froze_is_answered_by_others_and_what_has_begun_stays(stage: Stage) -> None:
    r0 = stage.replica("r0")
    text, *texts = await held_by(stage, r0)
    async with another_gateway(stage.cluster, "patient", **PATIENT) as gateway:
        await eventually(lambda: knows(stage, gateway.url, {"r0", "r1", "r2"}))
        async with held_stream(stage.http, gateway.url, text) as begun:
            assert begun.replica == "r0"
            async with asked(stage, gateway.url, r0, texts) as requests:
                assert "r0" not in await requests.were_answered_by()
                assert await requests.moved("dead", "unreachable") == len(texts)
            r0.signal(signal.SIGCONT)
            assert await begun.goes_on()


async def test_where_most_of_a_pool_dies_at_once_all_stays_where_it_is(stage: Stage) -> None:
    r0, r1 = stage.replica("r0"), stage.replica("r1")
    async with another_gateway(stage.cluster, "patient", **PATIENT) as gateway:
        texts = await held_by(stage, r0)
        r1.signal(signal.SIGSTOP)
        async with asked(stage, gateway.url, r0, texts) as requests:
            await eventually(lambda: are(stage, {"r0": "dead", "r1": "dead", "r2": "ready"}))
            await asyncio.sleep(2 * MOVES_WITHIN_S)  # no event shows that nothing happens
            for replica in (r0, r1):
                replica.signal(signal.SIGCONT)
            assert await requests.were_answered_by() == {"r0"}
            assert await requests.moved("dead", "unreachable") == 0


async def test_a_replica_that_hangs_counts_as_dead_until_it_shows_something(stage: Stage) -> None:
    r0 = stage.replica("r0")
    async with another_gateway(stage.cluster, "patient", **PATIENT) as gateway:
        async with asked(stage, gateway.url, r0, await held_by(stage, r0), mode="hang", count=-1) as requests:
            assert "r0" not in await requests.were_answered_by()
            assert await requests.moved("hung") == COUNT
        assert await are(stage, {"r0": "hung", "r1": "ready", "r2": "ready"})
        await eventually(lambda: is_avoided(stage, r0))
        ready = await stage.ready(gateway.url)
        assert (ready["status"], ready["not_ready"]) == (200, {"r0": "it has work, and shows no progress"})
        assert (await stage.http.get(f"{r0.url}/health")).is_success
        await stage.clear_faults(r0)
        assert is_complete(await ask(stage.http, r0.url, stage.new_prompt()))
        await eventually(lambda: are(stage, {"r0": "ready", "r1": "ready", "r2": "ready"}))


async def test_a_replica_that_is_slow_keeps_what_waits_for_it_while_it_gets_on_with_other_work(stage: Stage) -> None:
    r0 = stage.replica("r0")
    text, *texts = await held_by(stage, r0)
    async with (
        another_gateway(stage.cluster, "patient", **PATIENT) as gateway,
        held_stream(stage.http, stage.urls[0], text) as begun,
    ):
        assert begun.replica == "r0"
        async with asked(stage, gateway.url, r0, texts, mode="slow", count=-1, seconds=4) as requests:
            assert await requests.were_answered_by() == {"r0"}


async def test_what_one_gateway_cannot_reach_others_answer_for_it_and_all_else_goes_on(stage: Stage) -> None:
    r0 = stage.replica("r0")
    async with link_to(r0) as link:
        urls = {each.id: each.url for each in stage.cluster.replicas} | {"r0": f"http://127.0.0.1:{link.port}"}
        listed = {"replicas": [{"id": name, "url": url} for name, url in urls.items()]}
        async with another_gateway(stage.cluster, "patient", **PATIENT, **listed) as gateway:
            kept, *texts = await held_by(stage, r0)
            assert await answers(stage, gateway.url, kept)
            link.answers.hold()
            tasks = Tasks()
            requests = Requests(stage, gateway.url, texts, tasks)
            assert "r0" not in await requests.were_answered_by()
            assert await requests.moved("dead", "unreachable") > 0
            assert await answers(stage, stage.urls[0], kept)
            await link.mend()
            await eventually(lambda: answers(stage, gateway.url, kept))


@pytest.mark.parametrize("front_end", ["python", "rust"])
async def test_a_worker_that_alone_cannot_hear_a_replica_gives_its_part_away(
    stage: Stage, tmp_path: Path, front_end: str
) -> None:
    """vLLM's front end in Rust does not tell when its engine started."""
    model, told = f"kvgate/{front_end}", ("--rust-frontend",) if front_end == "rust" else ()
    async with AsyncExitStack() as stack:
        client = redis.Redis.from_url(stage.redis.url, decode_responses=True, protocol=2)
        ledger = Ledger(await stack.enter_async_context(client), pool_slug(model))
        started = [another_server(stage.http, tmp_path, "--model", model, *told) for _ in range(3)]
        servers = [await stack.enter_async_context(each) for each in started]
        link = await stack.enter_async_context(link_to(servers[0]))
        urls = [server.url for server in servers]
        deaf, hears = (
            [{"id": f"r{number}", "url": url} for number, url in enumerate([first, *urls[1:]])]
            for first in (f"http://127.0.0.1:{link.port}", urls[0])
        )
        worker = await stack.enter_async_context(another_gateway(stage.cluster, "deaf", replicas=deaf))
        await eventually(lambda: has_worker(ledger, "deaf"))
        other = await stack.enter_async_context(another_gateway(stage.cluster, "hears", replicas=hears))
        for gateway in (worker, other):
            await eventually(lambda url=gateway.url: knows(stage, url, {"r0", "r1", "r2"}))
        life = (await ledger.replicas())["r0"].incarnation
        link.answers.hold()
        await eventually(lambda: has_worker(ledger, "hears"))
        after = (await ledger.replicas())["r0"]
        assert (after.incarnation, after.state) == ("life-2" if told else life, "ready")
        assert worker.log.read_text().count("others hear it") == 1, "it does not insist"
        servers[1].kill()
        await eventually(lambda: are_in(ledger, {"r0": "ready", "r1": "dead", "r2": "ready"}))


async def has_worker(ledger: Ledger, gateway: str) -> bool:
    return (await ledger.worker()).startswith(f"{gateway}.")


async def answers(stage: Stage, url: str, text: str) -> bool:
    """Whether r0 answers this prompt through this gateway."""
    return (await ask(stage.http, url, text)).headers["x-kvgate-replica"] == "r0"


async def is_avoided(stage: Stage, replica: SimReplica) -> bool:
    return all(replica.id not in ready for ready in await stage.ready_replicas())
