"""A pair is one request: for limits, for the bill, for drains, and whatever its prompt has. Three gateways."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica
from gateway.tasks import Tasks
from tests.api.stage import api_key, bearer
from tests.cluster.clients import CHAT, last_event, prose, records_of
from tests.cluster.test_pairs import PREFILLS, Stage, decision_of, running
from tests.gateway.simulator.pictures import data_url
from tests.polling import eventually

EACH = 3
"""Requests that a replica serves at once."""
TIMES, TOKENS_PER_MIN = 12, 30_000
TENANTS = ("operations", "counted", "charged")
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 5000},
    "pairs": {"min_tokens": 100},
    "hedge": {"max_share": 0},
    "policy": {"max_active_requests": EACH},
    "tenants": [
        {"name": "counted", "limits": {"requests_per_min": TIMES}},
        {"name": "charged", "limits": {"tokens_per_min": TOKENS_PER_MIN}},
    ],
    "billing": {"prices": [{"model": "sim", "uncached_input_per_mtok": 1.0}]},
    "security": {
        "api_keys": [api_key(name, name, admin=True) for name in TENANTS],
        "cache_salt_secret": "0123456789abcdef",
    },
}


@dataclass
class KeyedStage(Stage):
    """All keys are admins': only these are told of replicas."""

    async def told(self, method: str, path: str, gateway: int = 0, **content: Any) -> Any:
        """What a gateway answers, as soon as Redis is in time: on a busy machine, it may be late."""

        async def answer() -> httpx.Response | None:
            found = await self.http.request(method, self.cluster.gateway_urls[gateway] + path, **content)
            return None if found.status_code == 503 else found

        return (await eventually(answer)).raise_for_status().json()

    async def alone(self, body: dict[str, Any]) -> str:
        """The answer of one replica without a gateway."""
        answer = await self.http.post(self.replicas["r0"].url + CHAT, json=body)
        return str(answer.json()["choices"][0]["message"]["content"])

    async def drain(self, name: str, what: str = "drain") -> None:
        await self.told("POST", f"/v1/replicas/{name}/{what}", gateway=1, json={})

    async def is_drained(self, name: str) -> bool:
        """For all gateways, and nothing is left there."""
        told = [(await self.http.get(f"{url}/ready")).json() for url in self.cluster.gateway_urls]
        [shown] = [each for each in (await self.told("GET", "/v1/replicas"))["replicas"] if each["id"] == name]
        return all(name in each.get("draining", ()) for each in told) and shown["active_requests"] == 0


@pytest.fixture(scope="module")
def pairs() -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    with running("--adapter", "french", config=CONFIG) as started:
        yield started


@pytest.fixture
async def stage(pairs: tuple[Cluster, dict[str, SimReplica]]) -> AsyncIterator[KeyedStage]:
    cluster, replicas = pairs
    async with (
        httpx.AsyncClient(timeout=60, headers=bearer("operations")) as http,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as store,
    ):
        yield KeyedStage(cluster, replicas, store, http)
        await eventually(lambda: KeyedStage(cluster, replicas, store, http).is_idle())


# -- what a prompt has ---------------------------------------------------------------------------------------------


async def test_images_are_computed_by_one_replica_and_decoded_by_another(stage: KeyedStage) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(50, (320, 320))}}
    content = [{"type": "text", "text": "Look."}, picture, {"type": "text", "text": "What is it?"}]
    body = {"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": content}]}
    before = stage.counts()["fetched"]
    for number in range(2):  # the second one is held where the first one was decoded
        answer = await stage.http.post(stage.cluster.gateway_urls[number] + CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert (decision_of(answer).get("prefill") in PREFILLS) == (number == 0)
        assert answer.json()["choices"][0]["message"]["content"] == await stage.alone(body)
    assert stage.counts()["fetched"] == before + 1


async def test_an_adapter_computes_the_prompt_and_decodes_it(stage: KeyedStage) -> None:
    text = prose("in french")
    body = {"model": "french", "max_tokens": 12, "messages": [{"role": "user", "content": text}]}
    await stage.drain("r1")
    await eventually(lambda: stage.is_drained("r1"))
    answer = await stage.ask(text, model="french")
    await stage.drain("r1", "undrain")
    assert answer.status_code == 200, answer.text
    assert decision_of(answer)["prefill"] == "r0"
    assert answer.json()["choices"][0]["message"]["content"] == await stage.alone(body)


def most_are_pairs(prefills: Iterable[str | None]) -> bool:
    """A machine that is too busy may take a prefill replica for dead."""
    found = list(prefills)
    return 2 * sum(each in PREFILLS for each in found) > len(found)


# -- limits and the bill -------------------------------------------------------------------------------------------


async def test_no_replica_gets_more_requests_at_once_than_its_limit_whether_it_computes_or_decodes(
    stage: KeyedStage,
) -> None:
    peaks: Counter[str] = Counter()

    async def look() -> None:
        while True:
            for name, sim in stage.replicas.items():
                peaks[name] = max(peaks[name], (await asyncio.to_thread(sim.state))["running"])

    looking = Tasks()
    looking.spawn(look(), "looking")
    asked = [stage.ask(prose(f"at once {n}", 1200), n % 3, stream=n % 2 == 1, max_tokens=40) for n in range(30)]
    answers = await asyncio.gather(*asked)
    await looking.close()
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert all(0 < peak <= EACH for peak in peaks.values())
    computed_by = Counter(decision_of(answer).get("prefill", "itself") for answer in answers)
    assert min(computed_by[name] for name in (*PREFILLS, "itself")) > 0
    assert stage.counts()["late"] == 0


async def test_a_pair_is_counted_once_by_limits_and_billed_once(stage: KeyedStage) -> None:
    told: Counter[str] = Counter()
    prefills: dict[str, str | None] = {}
    for number in range(TIMES):
        fields = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        answer = await stage.http.post(
            stage.cluster.gateway_urls[number % 3] + CHAT,
            json={"model": "sim", "messages": [{"role": "user", "content": prose(f"once {number}")}]} | fields,
            headers=bearer("counted"),
        )
        assert answer.status_code == 200, answer.text
        usage = last_event(answer.text.removesuffix("data: [DONE]\n\n"))["usage"] if fields else answer.json()["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        told += Counter(requests=1, uncached_tokens=usage["prompt_tokens"] - cached, cached_tokens=cached)
        told += Counter(output_tokens=usage["completion_tokens"])
        prefills[answer.headers["x-request-id"]] = decision_of(answer).get("prefill")

    async def is_billed() -> bool:
        rows = (await stage.told("GET", "/v1/usage?group=tenant"))["rows"]
        return [{name: row[name] for name in told} for row in rows if row["tenant"] == "counted"] == [dict(told)]

    assert most_are_pairs(prefills.values())
    await eventually(is_billed)
    for request_id, prefill in prefills.items():
        records = await records_of(stage.http, stage.cluster.gateway_urls[0], request_id)
        assert [each["prefill"] for each in records] == [prefill]


async def test_a_pair_is_charged_for_its_tokens_once(stage: KeyedStage) -> None:
    began_s, tokens = time.monotonic(), 0
    prefills: list[str | None] = []
    for number in range(TIMES):
        answer = await stage.http.post(
            stage.cluster.gateway_urls[number % 3] + CHAT,
            json={"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": prose(f"paid {number}")}]},
            headers=bearer("charged"),
        )
        assert answer.status_code == 200, answer.text
        prefills.append(decision_of(answer).get("prefill"))
        tokens += answer.json()["usage"]["total_tokens"]
    assert most_are_pairs(prefills)
    used = TOKENS_PER_MIN - int(answer.headers["x-ratelimit-remaining-tokens"])  # of the last one, what it may take
    given_back = (time.monotonic() - began_s) * TOKENS_PER_MIN / 60
    assert tokens - given_back - 100 <= used <= tokens + 100


# -- drains --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asking(stage: KeyedStage) -> AsyncIterator[list[httpx.Response]]:
    """Inside the context, four clients ask for fresh prompts at all gateways."""
    answers: list[httpx.Response] = []
    tasks, is_over = Tasks(), asyncio.Event()

    async def go_on(client: int) -> None:
        number = 0
        while not is_over.is_set():
            text = prose(f"drained {time.monotonic()} {client}")
            answers.append(await stage.ask(text, gateway=number % 3, stream=number % 2 == 1))
            number += 1

    running = [tasks.spawn(go_on(client), "a client") for client in range(4)]
    try:
        yield answers
    finally:
        is_over.set()
        await asyncio.gather(*running)


@pytest.mark.parametrize("drained", [("r0",), PREFILLS, ("r2",)], ids=["a prefill", "all prefills", "a decode"])
async def test_a_replica_that_is_drained_under_load_gets_neither_prompts_nor_requests(
    stage: KeyedStage, drained: tuple[str, ...]
) -> None:
    def ends(answers: list[httpx.Response]) -> set[str]:
        """The replicas that had a part in them."""
        return {end for each in answers for end in (each.headers["x-kvgate-replica"], decision_of(each).get("prefill"))}

    async with asking(stage) as answers:
        await eventually(lambda: ends(answers) >= {*drained})
        for name in drained:
            await stage.drain(name)
        for name in drained:
            await eventually(lambda name=name: stage.is_drained(name))
        asked = {name: stage.replicas[name].state()["requests"] for name in drained}
        since = len(answers)
        await eventually(lambda: len(answers) > since + 20)
        assert {name: stage.replicas[name].state()["requests"] for name in drained} == asked
        for name in drained:
            await stage.drain(name, "undrain")
        since = len(answers)
        await eventually(lambda: ends(answers[since:]) >= {*drained})
    assert {answer.status_code for answer in answers} == {200}
    assert not any('"error"' in answer.text for answer in answers)
    assert stage.counts()["late"] == 0
