"""When a client hangs up, its request is aborted on the replica and its load is given back at once."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import orjson
import pytest

from tests.chaos.stage import Stage
from tests.cluster.clients import CHAT, chat, held_stream
from tests.polling import eventually


async def aborted(stage: Stage) -> int:
    return sum([(await stage.replica_state(replica))["aborted"] for replica in stage.cluster.replicas])


async def has_aborted(stage: Stage, count: int) -> bool:
    return await aborted(stage) == count


async def is_running(stage: Stage, count: int) -> bool:
    states = [await stage.replica_state(replica) for replica in stage.cluster.replicas]
    return sum(state["running"] for state in states) == count


async def test_a_client_that_hangs_up_in_the_middle_of_a_stream_aborts_it(stage: Stage) -> None:
    before = await aborted(stage)
    hung_up = await stage.metric(stage.urls[0], "kvgate_client_disconnects_total")
    async with held_stream(stage.http, stage.urls[0], stage.new_prompt()):
        assert await stage.active_is(1)
    await eventually(stage.all_load_is_given_back, within_s=5)
    await eventually(lambda: has_aborted(stage, before + 1))
    assert await stage.metric(stage.urls[0], "kvgate_client_disconnects_total") == hung_up + 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_client_that_hangs_up_before_the_first_byte_aborts_its_request(stage: Stage, stream: bool) -> None:
    """Prefill of 60 000 tokens takes more than a second. The replica answers nothing in that time."""
    before = await aborted(stage)
    body = chat(" ".join(stage.new_prompt() for _ in range(60)), max_tokens=4000, stream=stream)
    async with asyncio.TaskGroup() as group:
        request = group.create_task(stage.http.post(stage.urls[0] + CHAT, json=body))
        await eventually(lambda: is_running(stage, 1))
        request.cancel()
    await eventually(stage.all_load_is_given_back, within_s=5)
    await eventually(lambda: has_aborted(stage, before + 1))


async def test_a_crowd_that_hangs_up_together_leaves_nothing_behind(stage: Stage) -> None:
    prompts = [stage.new_prompt() for _ in range(30)]
    async with asyncio.TaskGroup() as group:
        requests = [
            group.create_task(
                stage.http.post(stage.urls[n % 2] + CHAT, json=chat(text, max_tokens=4000, stream=n % 3 == 0))
            )
            for n, text in enumerate(prompts)
        ]
        await eventually(lambda: stage.active_is(30))
        for request in requests:
            request.cancel()
    await eventually(stage.all_load_is_given_back, within_s=5)
    await eventually(lambda: is_running(stage, 0))


async def test_a_client_that_hangs_up_behind_a_request_sent_ahead_aborts_the_one_before(stage: Stage) -> None:
    address = urlsplit(stage.urls[0])
    before = await aborted(stage)
    clients = []
    for _ in range(5):
        body = orjson.dumps(chat(stage.new_prompt(), max_tokens=4000))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write((head.encode() + body) * 2)
        clients.append(writer)
    await eventually(lambda: is_running(stage, 5))
    for writer in clients:
        writer.close()
    await eventually(stage.all_load_is_given_back, within_s=5)
    await eventually(lambda: has_aborted(stage, before + 5))
