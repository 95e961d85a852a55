"""Before the first byte of an answer, the client notices no failure of a replica."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from coordinator.breaker import FAILURES
from tests.chaos.stage import Stage
from tests.cluster.clients import ask, is_complete
from tests.polling import eventually

BEFORE_THE_FIRST_BYTE: list[tuple[dict[str, Any], str]] = [
    ({"mode": "reset", "count": 2}, "reset"),  # a kept connection, and the new one after it
    ({"mode": "error", "status": 500}, "status_500"),
    ({"mode": "error", "status": 503}, "status_503"),
    ({"mode": "error", "status": 429}, "status_429"),
]
BEFORE_THE_FIRST_TOKEN: list[tuple[dict[str, Any], str]] = [
    ({"mode": "cut", "after_tokens": 0}, "reset"),
    ({"mode": "truncate", "after_tokens": 0}, "empty"),
    ({"mode": "crash", "after_tokens": 0}, "reset"),
    ({"mode": "error", "status": 500, "after_tokens": 0}, "error_event"),
    ({"mode": "hang"}, "timeout"),
    ({"mode": "hang", "after_tokens": 0}, "timeout"),
]


async def served_elsewhere(stage: Stage, fault: dict[str, Any], reason: str, stream: bool) -> None:
    """The replica that holds a prompt fails once: another one answers, and only the metrics know."""

    async def is_retried() -> bool:
        """False where the gateway did not ask the replica, because it failed in earlier tests, seconds ago."""
        text, owner = await stage.warm_prompt()
        retries = await stage.metric(stage.urls[1], "kvgate_retries_total", reason=reason)
        await stage.fail(owner, **fault)
        answer = await ask(stage.http, stage.urls[1], text, stream=stream)
        assert is_complete(answer), answer.text
        assert answer.headers["x-kvgate-replica"] != owner.id
        await stage.clear_faults(owner)
        return await stage.metric(stage.urls[1], "kvgate_retries_total", reason=reason) == retries + 1

    await eventually(is_retried)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("fault", "reason"), BEFORE_THE_FIRST_BYTE, ids=lambda value: str(value))
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(
    stage: Stage, fault: dict[str, Any], reason: str, stream: bool
) -> None:
    await served_elsewhere(stage, fault, reason, stream)


@pytest.mark.parametrize(("fault", "reason"), BEFORE_THE_FIRST_TOKEN, ids=lambda value: str(value))
async def test_a_stream_that_dies_between_its_headers_and_its_first_token_is_retried_elsewhere(
    stage: Stage, fault: dict[str, Any], reason: str
) -> None:
    await served_elsewhere(stage, fault, reason, stream=True)


async def test_a_plain_answer_that_breaks_off_half_way_is_retried_elsewhere(stage: Stage) -> None:
    await served_elsewhere(stage, {"mode": "cut"}, "reset", stream=False)


async def test_a_replica_that_refuses_connections_is_replaced_unnoticed(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    owner.kill()
    answers = [await ask(stage.http, url, text, stream=stream) for url in stage.urls for stream in (False, True)]
    assert all(is_complete(answer) and answer.headers["x-kvgate-replica"] != owner.id for answer in answers)


async def test_a_hung_replica_is_left_after_the_first_byte_timeout_and_its_request_aborted(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    aborted = (await stage.replica_state(owner))["aborted"]
    await stage.fail(owner, "stall")
    answer = await ask(stage.http, stage.urls[0], text, stream=True)
    assert is_complete(answer)
    assert answer.headers["x-kvgate-replica"] != owner.id

    async def is_aborted() -> bool:
        return bool((await stage.replica_state(owner))["aborted"] == aborted + 1)

    await eventually(is_aborted)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_when_all_replicas_fail_the_last_error_passes_through(stage: Stage, status: int, stream: bool) -> None:
    await stage.fail_everywhere("error", status=status)
    answer = await ask(stage.http, stage.urls[0], stage.new_prompt(), stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == f"Simulated failure with status {status}"


@pytest.mark.parametrize("after_tokens", [None, 0], ids=["status", "error event"])
async def test_a_failure_that_a_second_replica_repeats_is_the_requests_own(
    stage: Stage, after_tokens: int | None
) -> None:
    """A prompt that makes every engine fail opens no breaker, and does not go to every replica."""
    retries = await stage.metric(stage.urls[0], "kvgate_retries_total")
    requests = 2 * FAILURES
    fault = {} if after_tokens is None else {"after_tokens": after_tokens}
    await stage.fail_everywhere("error", status=500, count=-1, **fault)
    for _ in range(requests):
        answer = await ask(stage.http, stage.urls[0], stage.new_prompt(), stream=True)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "Simulated failure with status 500"
    assert await stage.metric(stage.urls[0], "kvgate_retries_total") == retries + requests
    await stage.fail_everywhere("none")
    answer = await ask(stage.http, stage.urls[0], stage.new_prompt())
    assert answer.headers["x-kvgate-decision"].startswith("cold")
    assert await stage.ledger.breakers() == {}


async def test_a_failure_is_held_against_a_replica_when_another_one_answers(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    await stage.fail(owner, "error", status=500)
    assert is_complete(await ask(stage.http, stage.urls[0], text))
    await eventually(lambda: are_held_against(stage, owner.id))


async def test_a_connection_that_fails_is_held_against_every_replica(stage: Stage) -> None:
    await stage.fail_everywhere("reset", count=-1)
    assert (await ask(stage.http, stage.urls[0], stage.new_prompt())).status_code == 502
    await eventually(lambda: are_held_against(stage, "r0", "r1", "r2"))


async def test_ready_names_the_replicas_that_fail_too_often(stage: Stage) -> None:
    await stage.fail_everywhere("reset", count=-1)

    async def are_named() -> bool:
        assert (await ask(stage.http, stage.urls[0], stage.new_prompt())).status_code == 502
        told = [(await stage.http.get(f"{url}/ready")).json().get("breaker_open") for url in stage.urls]
        return told == [["r0", "r1", "r2"]] * len(stage.urls)

    await eventually(are_named)


async def are_held_against(stage: Stage, *replicas: str) -> bool:
    """Whether failures are counted of these replicas, and of no other."""
    return sorted(await stage.ledger.breakers()) == sorted(replicas)


async def test_a_client_that_hangs_up_after_a_failure_has_it_held_against_nobody(stage: Stage) -> None:
    """Otherwise a client with a prompt that makes engines fail could open breakers by hanging up in time."""
    text, owner = await stage.warm_prompt()
    retries = await stage.metric(stage.urls[0], "kvgate_retries_total")
    await stage.fail_everywhere("hang")
    await stage.clear_faults(owner)
    await stage.fail(owner, "error", status=500)
    async with asyncio.TaskGroup() as group:
        request = group.create_task(ask(stage.http, stage.urls[0], text))
        await eventually(lambda: has_retried(stage, retries))
        request.cancel()
    await eventually(stage.all_load_is_given_back)
    assert await stage.ledger.breakers() == {}


async def has_retried(stage: Stage, before: float) -> bool:
    return await stage.metric(stage.urls[0], "kvgate_retries_total") > before


async def test_what_any_replica_answered_is_passed_on_when_the_others_do_not_answer(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    await stage.fail_everywhere("reset", count=-1)
    await stage.clear_faults(owner)
    await stage.fail(owner, "error", status=500)
    answer = await ask(stage.http, stage.urls[0], text)
    assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (500, owner.id)


async def test_when_no_replica_gives_any_answer_the_client_gets_a_502(stage: Stage) -> None:
    await stage.fail_everywhere("reset", count=-1)
    answer = await ask(stage.http, stage.urls[0], stage.new_prompt())
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "replica_unreachable"
    assert "retry-after" in answer.headers


async def test_what_has_effects_is_sent_to_one_replica_and_the_openai_sdk_does_not_send_it_again(stage: Stage) -> None:
    await stage.fail_everywhere("reset", count=-1)
    retries = await stage.metric_of_all("kvgate_retries_total")
    requests = await stage.metric_of_all("kvgate_requests_total", path="/v1/responses")
    async with openai.AsyncOpenAI(base_url=f"{stage.urls[0]}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.responses.create(model="sim", input=stage.new_prompt(), background=True)
    assert (failed.value.status_code, failed.value.code) == (502, "maybe_executed")
    assert await stage.metric_of_all("kvgate_retries_total") == retries
    assert await stage.metric_of_all("kvgate_requests_total", path="/v1/responses") == requests + 1


async def test_a_refusal_of_the_request_itself_is_passed_on_and_never_retried(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    retries = await stage.metric_of_all("kvgate_retries_total")
    await stage.fail(owner, "error", status=400)
    answer = await ask(stage.http, stage.urls[0], text)
    assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (400, owner.id)
    assert await stage.metric_of_all("kvgate_retries_total") == retries
    assert await stage.ledger.breakers() == {}


async def test_what_a_failed_attempt_claimed_is_withdrawn(stage: Stage) -> None:
    """The replica never computed the prompt: the map must not send the next request there."""
    text = stage.new_prompt()
    await stage.fail_everywhere("error", status=503)
    await ask(stage.http, stage.urls[0], text)
    replicas = await stage.explained(text)
    assert {one["matched_tokens"] for one in replicas.values()} == {0}
