"""What the ledger counts for a request, however its answer ends, and whatever its client does."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest

from coordinator.usage import Consumed, Row
from tests.gateway.scripted import ASKED, CHAT, Relayed, ScriptedReplica, chunk, gateway_before, head, whole
from tests.polling import eventually

STREAM = head("content-type: text/event-stream", "transfer-encoding: chunked")
OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
PROMPT_TOKENS = range(500, 10_000)
"""An estimate of those of ASKED."""


def billed(relayed: Relayed) -> Consumed:
    """The only row."""
    [(row, consumed)] = [each for rows in relayed.gateway.ledger._sums.values() for each in rows.items()]
    assert row == Row("", "", "m")
    return consumed


def answered(**usage: Any) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
    return whole(orjson.dumps({"choices": [choice], "usage": usage}))


@pytest.mark.parametrize(
    ("details", "cached"),
    [({}, 0), ({"cached_tokens": 300}, 300), ({"cached_tokens": 5000}, 1000), ({"cached_tokens": -1}, 0)],
)
async def test_cached_tokens_are_those_that_the_engine_told_and_no_more_than_there_are(
    relayed: Relayed, details: dict[str, int], cached: int
) -> None:
    relayed.replica.says(answered(prompt_tokens=1000, completion_tokens=50, prompt_tokens_details=details))
    assert (await relayed.ask()).status_code == 200
    assert billed(relayed) == Consumed(1, 0, 1000 - cached, cached, 50)


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_a_request_that_was_refused_or_failed_is_an_error_and_takes_nothing(
    relayed: Relayed, status: int
) -> None:
    relayed.replica.says(whole(b'{"error":{"message":"no"}}', status=status))
    assert (await relayed.ask()).status_code == status
    assert billed(relayed) == Consumed(1, 1)


async def test_a_client_that_hangs_up_has_taken_what_the_engine_did_until_then_at_the_full_price(
    relayed: Relayed,
) -> None:
    received = OPENING + 7 * WORD
    relayed.replica.says(STREAM, chunk(received), asyncio.Event())
    async with relayed.http.stream("POST", CHAT, json={**ASKED, "stream": True, "max_tokens": 7}) as answer:
        async for piece in answer.aiter_raw():
            received = received[len(piece) :]
            if not received:
                break
    await eventually(lambda: relayed.gateway.ledger._sums)
    taken = billed(relayed)
    assert (taken.requests, taken.errors, taken.cached_tokens, taken.output_tokens) == (1, 0, 0, 7)
    assert taken.uncached_tokens in PROMPT_TOKENS


async def test_a_request_whose_time_is_over_is_an_error_and_has_taken_what_its_budgets_pay_for() -> None:
    replica = ScriptedReplica()
    replica.says(asyncio.Event())
    times = {"request_s": 0.5, "first_byte_s": 0.5}
    async with (
        replica.running(),
        gateway_before(replica, timeouts=times, retries={"max_attempts": 1}) as (gateway, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        assert (await http.post(CHAT, json={**ASKED, "max_tokens": 9})).status_code == 504
        taken = billed(Relayed(http, gateway, replica))
    assert (taken.requests, taken.errors, taken.output_tokens) == (1, 1, 9)
    assert taken.uncached_tokens in PROMPT_TOKENS


async def test_a_stream_that_breaks_off_is_an_error_and_has_taken_what_came(relayed: Relayed) -> None:
    relayed.replica.says(STREAM, chunk(OPENING + 3 * WORD))
    assert b"stream_broken" in (await relayed.stream()).content
    taken = billed(relayed)
    assert (taken.requests, taken.errors, taken.output_tokens) == (1, 1, 3)


async def test_only_the_attempt_that_answers_is_counted() -> None:
    async with AsyncExitStack() as stack:
        replicas = ScriptedReplica(), ScriptedReplica()
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        listed = [{"id": f"r{index}", "url": replica.url} for index, replica in enumerate(replicas)]
        gateway, url = await stack.enter_async_context(gateway_before(replicas[0], replicas=listed))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))

        async def answer(writer: asyncio.StreamWriter) -> None:
            if sum(replica.asked for replica in replicas) > 1:  # the first one breaks off
                writer.write(answered(prompt_tokens=1000, completion_tokens=50))

        for replica in replicas:
            replica.answer = answer
        assert (await http.post(CHAT, json=ASKED)).status_code == 200
        assert [replica.asked for replica in replicas] == [1, 1]
        assert billed(Relayed(http, gateway, replicas[0])) == Consumed(1, 0, 1000, 0, 50)


@pytest.mark.parametrize(("limit", "tokens"), [({"max_output_tokens": 900}, 900), ({}, 200)])
async def test_a_response_in_the_background_counts_as_long_as_it_may_be(
    relayed: Relayed, limit: dict[str, int], tokens: int
) -> None:
    """It is generated after its answer, and nobody need ever fetch it."""
    relayed.replica.says(whole(b'{"id":"resp_1","object":"response","status":"queued","usage":null}'))
    answer = await relayed.http.post(
        "/v1/responses", json={"model": "m", "input": "Hello, " * 1000, "background": True, "store": True, **limit}
    )
    assert answer.status_code == 200
    taken = billed(relayed)
    assert taken.output_tokens == tokens
    assert taken.uncached_tokens in PROMPT_TOKENS
