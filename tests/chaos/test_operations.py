"""What operators do with a cluster under way: drain a replica, scale to nothing and back, see who waits and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from bench.cluster import running_cluster
from coordinator.keys import models_key
from tests.chaos.stage import CONFIG, REPLICA_ARGUMENTS
from tests.chaos.tenant_stage import EACH, SLOTS, TenantStage, api_keys
from tests.cluster.clients import ask, chat, held_stream
from tests.cluster.gateways import another_gateway, kvgate
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

TENANTS = {"greedy": {}, "capped": {"limits": {"concurrency": 1}}, "urgent": {"priority": "realtime"}}
OPERATIONS_CONFIG: dict[str, Any] = CONFIG | {
    "policy": {"max_active_requests": EACH},
    "queue": {"wait_s": 30, "hold_s": 30, "engine_priority": True},
    "tenants": [{"name": name, **settings} for name, settings in TENANTS.items()],
    "security": {
        "share_cache": True,
        "expose_decisions": True,
        "api_keys": api_keys(TENANTS, admins=["greedy"]),
    },
}


class OperationsStage(TenantStage):
    """A cluster with agents, whose replicas take two requests each, and whose gateways hold requests."""

    async def get(self, path: str, gateway: int = 0) -> dict[str, Any]:
        answer = await self.http.get(self.urls[gateway] + path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def demand(self, gateway: int = 0) -> dict[str, Any]:
        return await self.get("/v1/demand?model=sim", gateway)

    async def command(self, *words: str) -> tuple[int, str]:
        """Runs `kvgate` against the first gateway. Returns its exit code, and its output with its errors."""
        return await kvgate(*words, "--gateway", self.urls[0], "--api-key", "greedy")

    async def are_exact(self) -> bool:
        return all([len((await self.ready(url))["exact"]) == len(self.cluster.replicas) for url in self.urls])


@pytest.fixture(scope="module")
def operations_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def operations_cluster(operations_redis: RedisServer) -> Iterator[OperationsStage]:
    with running_cluster(
        replica_arguments=REPLICA_ARGUMENTS, config=OPERATIONS_CONFIG, redis_url=operations_redis.url
    ) as cluster:
        yield OperationsStage(cluster, operations_redis)


@pytest.fixture
async def stage(operations_cluster: OperationsStage) -> AsyncIterator[OperationsStage]:
    async with operations_cluster.opened(TENANTS):
        await eventually(operations_cluster.are_exact)
        yield operations_cluster


# -- drain -----------------------------------------------------------------------------------------------------------


async def test_a_drained_replica_ends_its_streams_and_gets_nothing_new_on_any_gateway(stage: OperationsStage) -> None:
    prompt, replica = await stage.warm_prompt(on="r1")
    async with held_stream(stage.http, stage.urls[0], prompt) as stream:
        assert stream.replica == replica.id
        waiting = asyncio.get_running_loop().create_task(stage.command("drain", "r1", "--wait", "--timeout-s", "60"))
        await eventually(lambda: drained_everywhere(stage, "r1"))
        assert await stage.metric(stage.urls[0], "kvgate_replica_draining", replica="r1") == 1
        assert await stage.metric(stage.urls[0], "kvgate_replica_draining", replica="r0") == 0
        for number in range(6):
            answer = await ask(stage.http, stage.urls[number % 2], prompt)
            assert answer.headers["x-kvgate-replica"] != "r1"
        assert await stream.goes_on()
        assert not waiting.done()
    code, output = await waiting
    assert (code, output.splitlines()[-1]) == (0, "r1 is drained"), output
    assert await stage.client.zcard(stage.keys.held("r1")) == 0
    assert "r1" not in (await stage.ready(stage.urls[1]))["replicas"]
    assert "undrain" in (await stage.ready(stage.urls[1]))["not_ready"]["r1"]

    code, output = await stage.command("undrain", "r1")
    assert (code, output) == (0, "r1 is ready\n")
    await eventually(lambda: holds_again(stage, "r1"))  # its agent has said again what it holds


async def drained_everywhere(stage: OperationsStage, replica: str) -> bool:
    return all([replica not in (await stage.ready(url))["replicas"] for url in stage.urls])


async def holds_again(stage: OperationsStage, replica: str) -> bool:
    return int(await stage.client.zcard(stage.keys.held(replica))) > 0


async def test_a_drain_does_not_wait_for_the_keys_of_a_replica_that_has_died(stage: OperationsStage) -> None:
    replica = stage.replica("r2")
    await stage.warm_prompt(on="r2")
    replica.kill()
    await eventually(lambda: drained_everywhere(stage, "r2"))
    code, output = await stage.command("drain", "r2", "--wait", "--timeout-s", "60")
    assert (code, output.splitlines()[-1]) == (0, "r2 is drained, and dead"), output
    replica.start()
    await eventually(lambda: is_ready_everywhere(stage, "r2"))


async def test_an_engine_that_restarts_is_not_drained_any_more(stage: OperationsStage) -> None:
    assert (await stage.command("drain", "r2"))[0] == 0
    await eventually(lambda: drained_everywhere(stage, "r2"))
    replica = stage.replica("r2")
    replica.kill()
    replica.start()
    await eventually(lambda: is_ready_everywhere(stage, "r2"))


async def is_ready_everywhere(stage: OperationsStage, replica: str) -> bool:
    return all([replica in (await stage.ready(url))["replicas"] for url in stage.urls])


async def test_wrong_names_and_keys_are_refused(stage: OperationsStage) -> None:
    code, output = await stage.command("drain", "r9")
    assert (code, "kvgate replicas list lists them" in output) == (1, True), output
    json_type = {"content-type": "application/json"}
    refused = await stage.tenants["urgent"].post(stage.urls[0] + "/v1/replicas/r0/drain", headers=json_type)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    of_a_web_page = await stage.http.post(stage.urls[0] + "/v1/replicas/r0/drain", data={"a": "b"})
    assert (of_a_web_page.status_code, of_a_web_page.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert [one["state"] for one in (await stage.get("/v1/replicas"))["replicas"]] == ["ready"] * 3


# -- demand and the queue --------------------------------------------------------------------------------------------


async def test_every_gateway_tells_the_same_demand_and_one_exposes_it(stage: OperationsStage) -> None:
    async with stage.full():
        tasks = [stage.ask("greedy", number % 2) for number in range(4)]
        await stage.waits(4)
        first, second = await stage.demand(0), await stage.demand(1)
        assert {**first, "oldest_wait_s": 0} == {**second, "oldest_wait_s": 0}
        assert (first["waiting_requests"], first["running_requests"], first["slots"]) == (4, SLOTS, SLOTS)
        assert first["requests"] == 4 + SLOTS
        assert first["waiting_tokens"] > 4 * 300
        assert first["work_s"] == pytest.approx(
            (first["waiting_tokens"] + first["running_tokens"]) / first["prefill_tokens_per_s"], abs=0.001
        )
        assert await stage.metric_of_all("kvgate_demand_waiting_requests") == 4
        assert await stage.metric_of_all("kvgate_demand_running_requests") == SLOTS
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4


async def test_the_queue_is_shown_with_who_waits_since_when_and_why(stage: OperationsStage) -> None:
    async with held_stream(stage.tenants["capped"], stage.urls[0], stage.new_prompt()):
        parked = stage.ask("capped", 1)
        await stage.waits(1)
        explained = await stage.tenants["capped"].post(
            stage.urls[0] + "/v1/route/explain", json=chat(stage.new_prompt())
        )
        assert explained.json()["choice"]["waits"]["why"] == "concurrency"
        async with AsyncExitStack() as streams:
            for number in range(SLOTS - 1):
                url = stage.urls[number % 2]
                await streams.enter_async_context(held_stream(stage.http, url, stage.new_prompt()))
            waiting = stage.ask("greedy", 0)
            await stage.waits(2)
            choice = (await stage.explain(stage.new_prompt()))["choice"]
            assert (choice["waits"]["why"], choice["waits"]["ahead"]) == ("no_room", 1)
            [pool] = (await stage.get("/v1/queue", 1))["pools"]
            assert {(one["tenant"], one["why"]) for one in pool["waiting"]} == {
                ("capped", "concurrency"),
                ("greedy", "no_room"),
            }
            assert not any(room["has_room"] for room in pool["replicas"])
            code, output = await stage.command("queue")
            assert (code, "2 requests waiting" in output) == (0, True), output
            assert f"{EACH} of {EACH}" in output
        assert (await waiting).status_code == 200
    assert (await parked).status_code == 200


# -- scale to zero ---------------------------------------------------------------------------------------------------


async def test_requests_for_a_known_model_wait_until_a_replica_is_there(stage: OperationsStage) -> None:
    await eventually(lambda: stage.client.hexists(models_key(), "sim"))
    for replica in stage.cluster.replicas:
        replica.kill()
    tasks = [stage.ask("greedy", 0), stage.ask("urgent", 1)]  # before anybody has noticed
    await eventually(lambda: none_is_ready(stage))
    async with another_gateway(stage.cluster, "late") as late:  # it learns of the model from the store only
        tasks.append(asyncio.get_running_loop().create_task(ask(stage.http, late.url, stage.new_prompt())))
        gone = stage.ask("greedy", 1)
        await eventually(lambda: demand_is(stage, 4))
        gone.cancel()
        await eventually(lambda: demand_is(stage, 3))
        demand = await stage.demand()
        assert (demand["held_requests"], demand["ready_replicas"], demand["work_s"]) == (3, 0, None)
        assert await stage.metric(late.url, "kvgate_gateway_ready") == 1  # though there is no replica
        assert (await stage.http.get(late.url + "/v1/models")).json()["data"][0]["id"] == "sim"
        explained = await stage.explain(stage.new_prompt(), late.url)
        assert explained["choice"]["why"] == "held"
        stage.cluster.replicas[0].start()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    await eventually(lambda: demand_is(stage, 0))


async def none_is_ready(stage: OperationsStage) -> bool:
    return (await stage.demand())["ready_replicas"] == 0


async def demand_is(stage: OperationsStage, waiting: int) -> bool:
    return bool((await stage.demand())["waiting_requests"] == waiting)


async def test_requests_wait_while_all_replicas_are_drained_except_those_that_compute_nothing(
    stage: OperationsStage,
) -> None:
    for replica in stage.cluster.replicas:
        assert (await stage.command("drain", replica.id))[0] == 0
    held = [stage.ask("greedy", number % 2) for number in range(4)]  # gateways may not know of the last drain yet
    await eventually(lambda: demand_is(stage, 4))
    tokenize = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    refused = await stage.http.post(stage.urls[0] + "/tokenize", json=tokenize)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    for replica in stage.cluster.replicas:
        assert (await stage.command("undrain", replica.id))[0] == 0
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 4


async def test_a_request_is_not_held_longer_than_it_may_be_and_unknown_models_are_not_held(
    stage: OperationsStage,
) -> None:
    unknown = await stage.http.post(stage.urls[0] + "/v1/chat/completions", json=chat("x") | {"model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    for replica in stage.cluster.replicas:
        replica.kill()
    await eventually(lambda: none_is_ready(stage))
    queue = OPERATIONS_CONFIG["queue"] | {"hold_s": 0.2}
    async with another_gateway(stage.cluster, "hasty", queue=queue) as hasty:
        late = await ask(stage.http, hasty.url, stage.new_prompt())
    assert (late.status_code, late.json()["error"]["code"]) == (503, "no_replica")
    assert "0.2 s" in late.json()["error"]["message"]


# -- what the engine and the client see ------------------------------------------------------------------------------


async def test_engines_get_the_priority_of_the_band_and_never_the_clients(stage: OperationsStage) -> None:
    for tenant, priority in (("greedy", "0"), ("urgent", "-1")):
        http = stage.tenants[tenant]
        answer = await http.post(
            stage.urls[0] + "/v1/chat/completions",
            json=chat(stage.new_prompt(), priority=-100),
            headers={"x-vllm-priority": "-100"},
        )
        seen = await seen_by(stage, answer)
        assert seen["headers"].get("X-Vllm-Priority") == priority
        assert "priority" not in seen["body_keys"]


async def seen_by(stage: OperationsStage, answer: httpx.Response) -> dict[str, Any]:
    """What the replica saw of the request with this answer."""
    state = await stage.replica_state(stage.replica(answer.headers["x-kvgate-replica"]))
    request_id = answer.headers["x-request-id"]
    found: dict[str, Any] = next(one for one in state["recent"] if one["request_id"] == request_id)
    return found


async def test_a_stream_that_waits_is_kept_alive_with_comments(stage: OperationsStage) -> None:
    queue = OPERATIONS_CONFIG["queue"] | {"keep_alive_s": 0.1, "wait_s": 0.5}
    body = chat(stage.new_prompt()) | {"stream": True}
    async with another_gateway(stage.cluster, "patient", queue=queue | {"wait_s": 30}) as patient:
        async with AsyncExitStack() as answers:
            async with stage.full():
                request = stage.http.stream("POST", patient.url + "/v1/chat/completions", json=body)
                pieces = (await answers.enter_async_context(request)).aiter_text()
                assert await anext(pieces) == ": waiting\n\n"
                asking = asyncio.get_running_loop().create_task(by_sdk(patient.url, stage.new_prompt()))
                await stage.waits(2)
            text = "".join([piece async for piece in pieces])
        assert text.endswith("data: [DONE]\n\n")
        assert await asking == "stop"
    async with another_gateway(stage.cluster, "hasty", queue=queue) as hasty, stage.full():
        late = await stage.http.post(hasty.url + "/v1/chat/completions", json=body)
    assert late.status_code == 200
    assert late.text.startswith(": waiting\n\n")
    assert '"code":"deadline_unreachable"' in late.text


async def by_sdk(url: str, prompt: str) -> str | None:
    """The finish reason of a stream that OpenAI's SDK reads."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="greedy", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": prompt}], stream=True
        )
        reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
    return reasons[-1]
