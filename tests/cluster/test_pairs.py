"""One replica computes a prompt, and another one fetches its KV cache and decodes: three gateways, five replicas."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP, Signals
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, Daemon, SimReplica, running_gateways, running_replicas
from coordinator.keys import PoolKeys
from gateway.ops.cli.explain import reasons
from gateway.ops.local.state_dir import read_processes
from tests.cluster.clients import CHAT, prose, records_of
from tests.polling import eventually, wait_until

# A prompt of 600 tokens takes 60 ms.
REPLICA_ARGUMENTS = (
    "--nixl",
    "--prefill-tokens-per-s",
    "10000",
    "--decode-s-per-token",
    "0.01",
    "--vllm-version",
    "0.33.0",
)
PREFILLS, DECODES = ("r0", "r1"), ("r2", "r3", "r4")
CONFIG: dict[str, Any] = {"redis": {"budget_ms": 500}, "pairs": {"min_tokens": 100}, "hedge": {"max_share": 0}}


@dataclass
class Stage:
    cluster: Cluster
    replicas: dict[str, SimReplica]
    store: redis.Redis
    http: httpx.AsyncClient

    async def ask(self, text: str, gateway: int = 0, path: str = CHAT, **fields: Any) -> httpx.Response:
        body = {"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post(self.cluster.gateway_urls[gateway] + path, json=body)

    def counts(self, *names: str) -> dict[str, int]:
        """What became of the references of these replicas, in all."""
        told = [self.replicas[name].state()["nixl"] for name in names or self.replicas]
        return {what: sum(each.get(what, 0) for each in told) for what in ("given", "fetched", "late", "failed")}

    async def unpaired(self, why: str) -> float:
        """What all gateways count."""
        pages = [(await self.http.get(f"{url}/metrics")).text for url in self.cluster.gateway_urls]
        found = [re.search(rf'^kvgate_unpaired_total{{why="{why}"}} (\S+)', page, re.MULTILINE) for page in pages]
        return sum(float(each[1]) for each in found if each)

    def all_ready(self) -> bool:
        return all(
            len(httpx.get(f"{url}/ready").json()["replicas"]) == len(self.replicas) for url in self.cluster.gateway_urls
        )

    @property
    def breakers(self) -> str:
        return PoolKeys(self.cluster.pool).breakers

    async def is_idle(self) -> bool:
        keys = PoolKeys(self.cluster.pool)
        told = [await self.store.hvals(key) for key in (keys.active, keys.backlog_tokens)]
        flights = [await self.store.hlen(keys.flight(gateway)) for gateway in await self.store.hkeys(keys.gateways)]
        return not any(flights) and {each for some in told for each in some} <= {"0"}


@contextmanager
def running(*arguments: str, config: dict[str, Any] = CONFIG) -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    roles = {name: "role=prefill" if name in PREFILLS else "role=decode" for name in (*PREFILLS, *DECODES)}
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
        running_replicas(Path(folder), len(roles), (*REPLICA_ARGUMENTS, *arguments)) as sims,
        running_gateways({sim.id: sim.url for sim in sims}, gateways=3, config=config, beside=roles) as cluster,
    ):
        for url in cluster.gateway_urls:
            wait_until(lambda url=url: len(httpx.get(f"{url}/ready").json()["replicas"]) == len(roles))
        yield cluster, {sim.id: sim for sim in sims}


@pytest.fixture(scope="module")
def pairs() -> Iterator[tuple[Cluster, dict[str, SimReplica]]]:
    with running() as started:
        yield started


@pytest.fixture
async def stage(pairs: tuple[Cluster, dict[str, SimReplica]]) -> AsyncIterator[Stage]:
    cluster, replicas = pairs
    async with (
        httpx.AsyncClient(timeout=60) as http,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as store,
    ):
        yield Stage(cluster, replicas, store, http)


def decision_of(answer: httpx.Response) -> dict[str, str]:
    parts = answer.headers["x-kvgate-decision"].split("; ")
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


async def test_a_prompt_is_computed_by_one_replica_and_decoded_by_another_with_the_same_answer(stage: Stage) -> None:
    for number, stream in enumerate((False, True)):
        before, text = stage.counts(), prose(f"pair {number}")
        answer = await stage.ask(text, gateway=number, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvgate-replica"] in DECODES
        assert decision_of(answer)["prefill"] in PREFILLS
        after = stage.counts()
        assert (after["given"], after["fetched"]) == (before["given"] + 1, before["fetched"] + 1)
        body = {"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": text}]}
        alone = (await stage.http.post(stage.replicas["r0"].url + CHAT, json=body)).json()
        told = alone["choices"][0]["message"]["content"]
        assert (told if stream else answer.json()["choices"][0]["message"]["content"]) == told
        assert not stream or all(word in answer.text for word in told.split())
        assert "kv_transfer_params" not in answer.text.replace('"kv_transfer_params":null', "")
    await eventually(stage.is_idle)


async def test_a_short_prompt_several_choices_and_what_decode_holds_are_computed_where_they_are_decoded(
    stage: Stage,
) -> None:
    before = stage.counts()
    for text, fields, why, words in (
        ("short", {}, "short", "less of it was missing there than pairs.min_tokens"),
        (prose("several"), {"n": 2}, "n", "requests with n are not paired"),
        (prose("in full"), {"prompt_logprobs": 1}, "prompt_logprobs", "requests with prompt_logprobs are not paired"),
    ):
        answer = await stage.ask(text, **fields)
        assert answer.status_code == 200, answer.text
        assert "prefill" not in decision_of(answer)
        [record] = await records_of(stage.http, stage.cluster.gateway_urls[0], answer.headers["x-request-id"])
        assert (record["prefill"], record["unpaired"]) == (None, why)
        assert any(line.endswith(f"computed its prompt itself: {words}") for line in reasons(record))
        assert await stage.unpaired(why) > 0
    text = prose("held")
    assert "prefill" in decision_of(await stage.ask(text))

    async def is_held() -> bool:
        return "prefill" not in decision_of(await stage.ask(text))

    await eventually(is_held)
    assert stage.counts()["late"] == before["late"]
    await eventually(stage.is_idle)


@pytest.mark.slow
async def test_of_many_prompts_at_once_some_are_computed_where_they_are_decoded_instead_of_waiting(
    stage: Stage,
) -> None:
    before, texts = await stage.unpaired("no_room"), [prose(f"crowd {number}", 1500) for number in range(12)]
    for name in PREFILLS:  # so that they are many at once, however busy this machine is
        await asyncio.to_thread(stage.replicas[name].fail, "slower", times=4)
    asked = (stage.ask(text, gateway=number % 3, max_tokens=2) for number, text in enumerate(texts))
    answers = await asyncio.gather(*asked)
    for name in PREFILLS:
        await asyncio.to_thread(stage.replicas[name].fail, "none")
    assert {answer.status_code for answer in answers} == {200}
    assert any("prefill" in decision_of(answer) for answer in answers)
    assert await stage.unpaired("no_room") > before
    await eventually(stage.is_idle)


async def test_no_client_can_name_a_reference(stage: Stage) -> None:
    before = stage.counts()
    answer = await stage.ask("mine", kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": True})
    assert answer.status_code == 200
    assert stage.counts() == before


_LESS_TOLD = ("all prefills are frozen", "the prefill breaks off", "decode is frozen", "decode fails")
"""They take as long, and tell little that the others do not."""


def trouble(stage: Stage, what: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """What happens, and how it ends."""
    prefill, decode = stage.replicas["r0"], stage.replicas["r2"]

    def all_prefills(number: Signals) -> None:
        for name in PREFILLS:
            stage.replicas[name].signal(number)

    def revive(sim: SimReplica) -> None:
        sim.start()
        sim.wait_until_ready()

    server = Daemon(next(each for each in read_processes(stage.cluster.state_dir) if each.kind == "redis"))
    return {
        "the prefill is killed": (prefill.kill, partial(revive, prefill)),
        "all prefills are frozen": (partial(all_prefills, SIGSTOP), partial(all_prefills, SIGCONT)),
        "the prefill fails": (partial(prefill.fail, "error", count=-1), partial(prefill.fail, "none")),
        "the prefill breaks off": (partial(prefill.fail, "cut", count=-1), partial(prefill.fail, "none")),
        "decode is killed": (decode.kill, partial(revive, decode)),
        "decode is frozen": (partial(decode.signal, SIGSTOP), partial(decode.signal, SIGCONT)),
        "decode fails": (partial(decode.fail, "error", count=-1), partial(decode.fail, "none")),
        "decode breaks off": (partial(decode.fail, "cut", count=-1), partial(decode.fail, "none")),
        "Redis stands still": (partial(server.signal, SIGSTOP), partial(server.signal, SIGCONT)),
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        *("the prefill is killed", "the prefill fails"),
        *("decode is killed", "decode breaks off", "Redis stands still"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in _LESS_TOLD),
    ],
)
async def test_no_request_fails_and_no_reference_goes_out_twice_when(what: str, stage: Stage) -> None:
    await eventually(stage.is_idle)
    begin, end = trouble(stage, what)
    texts = [prose(f"{what} {number}") for number in range(24)]
    asked: list[asyncio.Task[httpx.Response]] = []
    for number, text in enumerate(texts):
        if number == 8:
            begin()
        asked.append(asyncio.ensure_future(stage.ask(text, gateway=number % 3, stream=number % 2 == 1, max_tokens=40)))
        await asyncio.wait(asked, timeout=0.05)
    answers = await asyncio.gather(*asked)
    end()
    assert [answer.status_code for answer in answers] == [200] * len(texts)
    assert all(not number % 2 or answer.text.endswith("data: [DONE]\n\n") for number, answer in enumerate(answers))
    assert stage.counts()["late"] == 0
    if what == "the prefill fails":  # at no request from then on
        assert {decision_of(answer).get("prefill") for answer in answers[8:]} <= {None, "r1"}
    for text, answer in list(zip(texts, answers, strict=True))[::2]:
        body = {"model": "sim", "max_tokens": 40, "messages": [{"role": "user", "content": text}]}
        alone = (await stage.http.post(stage.replicas["r1"].url + CHAT, json=body)).json()
        assert answer.json()["choices"][0]["message"] == alone["choices"][0]["message"]
    await eventually(stage.is_idle)
    await eventually(lambda: asyncio.to_thread(stage.all_ready))


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_that_cannot_fetch_is_not_to_blame_and_is_asked_again_without_a_reference(
    stage: Stage, stream: bool
) -> None:
    await eventually(stage.is_idle)
    for name in PREFILLS:
        stage.replicas[name].fail("no_blocks", count=-1)
    before, known = stage.counts(*DECODES)["failed"], set(await stage.store.hkeys(stage.breakers))
    answer = await stage.ask(prose(f"unfetched {stream}"), stream=stream)
    for name in PREFILLS:
        stage.replicas[name].fail("none")
    assert answer.status_code == 200
    assert "error" not in answer.text
    assert "prefill" not in decision_of(answer)
    assert stage.counts(*DECODES)["failed"] == before + 1
    assert set(await stage.store.hkeys(stage.breakers)) <= known
    await eventually(stage.is_idle)


async def test_a_record_says_which_prefill_failed(stage: Stage) -> None:
    await eventually(stage.is_idle)
    for name in PREFILLS:
        stage.replicas[name].fail("error", count=1)
    answer = await stage.ask(prose("recorded"))
    for name in PREFILLS:
        stage.replicas[name].fail("none")
    [record] = await records_of(stage.http, stage.cluster.gateway_urls[0], answer.headers["x-request-id"])
    [failed] = record["failed"]
    assert failed["replica"] in PREFILLS
    assert (failed["why"], record["prefill"], record["unpaired"], record["replica"]) == (
        "status_500",
        None,
        "failed",
        answer.headers["x-kvgate-replica"],
    )
