"""Both replicas of a pair get a request at once, and Mooncake moves the KV cache: two gateways, four replicas."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica, running_gateways, running_replicas
from tests.cluster.clients import CHAT, prose, records_of
from tests.cluster.test_pairs import REPLICA_ARGUMENTS, Stage, decision_of
from tests.polling import eventually, wait_until

ARGUMENTS = ("--mooncake", *REPLICA_ARGUMENTS[1:])
PREFILLS, DECODES = ("r0", "r1"), ("r2", "r3")
PRICE = 0.001
"""Of a prompt token that no replica had cached."""
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 500},
    "pairs": {"protocol": "mooncake", "min_tokens": 100},
    "hedge": {"max_share": 0},
    "billing": {"prices": [{"model": "sim", "uncached_input_per_mtok": 1000.0, "cached_input_per_mtok": 0.0}]},
}


@dataclass
class MooncakeStage(Stage):
    def told(self, what: str, *names: str) -> int:
        """What became of transfers at these replicas, in all."""
        return sum(self.replicas[name].state()["mooncake"].get(what, 0) for name in names or self.replicas)

    def costs(self) -> float:
        pages = [httpx.get(f"{url}/metrics").text for url in self.cluster.gateway_urls]
        return sum(float(cost) for page in pages for cost in re.findall(r"^kvgate_cost_total\{.*\} (\S+)$", page, re.M))

    async def until_all_compute(self) -> None:
        """Gateway 0 has had a prompt computed by each prefill: it knows their engines, and no breaker is open."""
        seen: set[str] = set()

        async def have_all() -> bool:
            answer = await self.ask(prose(f"known {time.monotonic()}"))
            seen.add(decision_of(answer).get("prefill", ""))
            return seen >= {*PREFILLS}

        await eventually(have_all)
        await eventually(self.is_idle)

    async def why_not(self, answer: httpx.Response) -> list[str]:
        """Why prefills failed, by the record of a request that gateway 0 served without one."""
        assert answer.status_code == 200
        [record] = await records_of(self.http, self.cluster.gateway_urls[0], answer.headers["x-request-id"])
        assert record["prefill"] is None
        return [each["why"] for each in record["failed"]]

    async def is_right(self, answer: httpx.Response, text: str, **fields: Any) -> bool:
        """Whether one replica alone gives the same answer."""
        body = {"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": text}], **fields}
        alone = (await self.http.post(self.replicas["r1"].url + CHAT, json=body)).json()
        return bool(answer.json()["choices"][0]["message"] == alone["choices"][0]["message"])


def _role(sim: SimReplica) -> str:
    return f"role=prefill,bootstrap_port={sim.port}" if sim.id in PREFILLS else "role=decode"


@pytest.fixture(scope="module")
def pairs() -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
        running_replicas(Path(folder), len(PREFILLS + DECODES), ARGUMENTS) as sims,
        running_gateways(
            {sim.id: sim.url for sim in sims},
            config=CONFIG,
            beside={sim.id: _role(sim) for sim in sims},
        ) as cluster,
    ):
        for url in cluster.gateway_urls:
            wait_until(lambda url=url: len(httpx.get(f"{url}/ready").json()["replicas"]) == len(sims))
        yield cluster, {sim.id: sim for sim in sims}


@pytest.fixture
async def stage(pairs: tuple[Cluster, dict[str, SimReplica]]) -> AsyncIterator[MooncakeStage]:
    cluster, replicas = pairs
    async with (
        httpx.AsyncClient(timeout=60) as http,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as store,
    ):
        yield MooncakeStage(cluster, replicas, store, http)


async def test_a_pushed_prompt_gives_the_same_answer_and_is_billed_as_what_the_prefill_computed(
    stage: MooncakeStage,
) -> None:
    cost, prompt_tokens = stage.costs(), 0
    for number, stream in enumerate((False, True, False)):
        before, text = stage.told("fetched"), prose(f"pushed {number}")
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await stage.ask(text, gateway=number % 2, **options)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvgate-replica"] in DECODES
        assert decision_of(answer)["prefill"] in PREFILLS
        assert stage.told("fetched") == before + 1
        assert stream or await stage.is_right(answer, text)
        prompt_tokens += int(re.findall(r'"prompt_tokens": ?(\d+)', answer.text)[-1])
    assert stage.told("repeated") == 0
    assert stage.costs() - cost == pytest.approx(prompt_tokens * PRICE)
    await eventually(stage.is_idle)


async def test_decode_has_the_request_before_the_prefill_has_answered(stage: MooncakeStage) -> None:
    for name in PREFILLS:
        stage.replicas[name].fail("stall", count=-1)
    asked = sum(stage.replicas[name].state()["requests"] for name in DECODES)
    answer = asyncio.ensure_future(stage.ask(prose("at once")))
    await eventually(lambda: sum(stage.replicas[name].state()["requests"] for name in DECODES) == asked + 1)
    assert not answer.done()
    for name in PREFILLS:
        stage.replicas[name].fail("none")
    assert "prefill" in decision_of(await answer)
    await eventually(stage.is_idle)


async def test_a_prefill_that_ends_otherwise_than_by_its_limit_keeps_nobody_waiting(stage: MooncakeStage) -> None:
    text, before = prose("stopped"), stage.told("fetched")
    alone = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    told = (await stage.http.post(stage.replicas["r1"].url + CHAT, json=alone)).json()["choices"][0]["message"]
    answer = await stage.ask(text, stop=[told["content"].split()[0]])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert await stage.why_not(answer) == ["not_cut"]
    assert stage.told("fetched") == before
    await eventually(stage.is_idle)


async def test_an_engine_whose_leg_failed_is_asked_for_again_and_if_nobody_names_it_a_record_says_so(
    stage: MooncakeStage,
) -> None:
    await stage.until_all_compute()
    for name in PREFILLS:
        stage.replicas[name].fail("no_bootstrap", count=-1)
        stage.replicas[name].fail("error", count=-1)
    whys = [await stage.why_not(await stage.ask(prose(f"unnamed {number}"))) for number in range(4)]
    for name in PREFILLS:
        stage.replicas[name].fail("none")
    assert whys[0] == ["status_500"]
    assert ["no_engine_id"] in whys
    await eventually(stage.is_idle)


async def test_a_prefill_that_dies_before_it_has_pushed_keeps_nobody_waiting(stage: MooncakeStage) -> None:
    await stage.until_all_compute()
    prefills = [stage.replicas[name] for name in PREFILLS]
    before = [sim.state()["requests"] for sim in prefills]
    for sim in prefills:
        sim.fail("no_push", count=-1)
    asked = asyncio.ensure_future(stage.ask(text := prose("not pushed")))

    def have_computed() -> list[SimReplica]:
        told = [sim.state() for sim in prefills]
        return [
            sim
            for sim, now, requests in zip(prefills, told, before, strict=True)
            if now["requests"] > requests and not now["running"] + now["waiting"]
        ]

    await eventually(lambda: asyncio.to_thread(have_computed))
    [computed] = have_computed()
    computed.kill()
    answer = await asked
    for sim in prefills:
        _revive(sim) if sim is computed else sim.fail("none")
    assert await stage.why_not(answer) == ["gone"]
    assert await stage.is_right(answer, text)
    await eventually(stage.is_idle)
    await eventually(lambda: asyncio.to_thread(stage.all_ready))


def _revive(sim: SimReplica) -> None:
    sim.start()
    sim.wait_until_ready()


def trouble(stage: MooncakeStage, what: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """What happens, and how it ends."""
    prefills, decode = [stage.replicas[name] for name in PREFILLS], stage.replicas["r2"]

    def each(*calls: Callable[[SimReplica], Any]) -> Callable[[], None]:
        return lambda: [call(sim) for sim in prefills for call in calls] and None

    return {
        "a prefill is killed": (prefills[0].kill, partial(_revive, prefills[0])),
        "a prefill gets another life": (each(lambda sim: sim.kill(), _revive), each()),
        "all prefills are frozen": (each(lambda sim: sim.signal(SIGSTOP)), each(lambda sim: sim.signal(SIGCONT))),
        "all prefills fail": (each(lambda sim: sim.fail("error", count=-1)), each(lambda sim: sim.fail("none"))),
        "decode is killed": (decode.kill, partial(_revive, decode)),
        "decode breaks off": (partial(decode.fail, "cut", count=-1), partial(decode.fail, "none")),
    }[what]


_LESS_TOLD = ("a prefill gets another life", "all prefills are frozen", "all prefills fail", "decode breaks off")


@pytest.mark.parametrize(
    "what",
    [
        *("a prefill is killed", "decode is killed"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in _LESS_TOLD),
    ],
)
async def test_no_request_fails_or_hangs_and_no_transfer_id_is_used_twice_when(what: str, stage: MooncakeStage) -> None:
    await eventually(stage.is_idle)
    begin, end = trouble(stage, what)
    texts = [prose(f"{what} {number}") for number in range(20)]
    asked: list[asyncio.Task[httpx.Response]] = []
    for number, text in enumerate(texts):
        if number == 6:
            await asyncio.to_thread(begin)
        one = stage.ask(text, gateway=number % 2, stream=number % 2 == 1, max_tokens=30)
        asked.append(asyncio.ensure_future(one))
        await asyncio.wait(asked, timeout=0.05)
    answers = await asyncio.gather(*asked)
    await asyncio.to_thread(end)
    assert [answer.status_code for answer in answers] == [200] * len(texts)
    assert all(not number % 2 or answer.text.endswith("data: [DONE]\n\n") for number, answer in enumerate(answers))
    for text, answer in list(zip(texts, answers, strict=True))[::2]:
        assert await stage.is_right(answer, text, max_tokens=30)
    assert stage.told("repeated") == 0
    await eventually(stage.is_idle)
    await eventually(lambda: asyncio.to_thread(stage.all_ready))
