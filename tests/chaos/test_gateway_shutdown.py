"""On SIGTERM a gateway stops accepting, finishes the requests that fit its grace period, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.chaos.stage import Stage
from tests.cluster.clients import CHAT, ask, chat, held_stream, last_event
from tests.cluster.gateways import GatewayProcess, another_gateway
from tests.polling import eventually


async def refuses(http: httpx.AsyncClient, gateway: GatewayProcess) -> bool:
    try:
        await http.get(f"{gateway.url}/health")
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):
        pass  # accepted while the gateway stopped: the next connection is refused
    return False


async def is_registered(stage: Stage, gateway: GatewayProcess) -> bool:
    return any(name.startswith(f"{gateway.id}.") for name in await stage.ledger.gateways())


async def test_a_gateway_told_to_stop_finishes_its_streams_and_deregisters(stage: Stage) -> None:
    async with (
        another_gateway(stage.cluster, "leaving", timeouts={"grace_s": 20}) as leaving,
        held_stream(stage.http, leaving.url, stage.new_prompt(), max_tokens=60) as stream,
    ):
        plain = asyncio.ensure_future(ask(stage.http, leaving.url, stage.new_prompt(), max_tokens=60))
        await eventually(lambda: stage.active_is(2))
        leaving.signal(signal.SIGTERM)
        async with httpx.AsyncClient() as newcomer:
            await eventually(lambda: refuses(newcomer, leaving))
        assert await is_registered(stage, leaving), "it still carries requests"
        assert (await stream.rest()).endswith("data: [DONE]\n\n")
        assert (await plain).json()["choices"][0]["finish_reason"] == "length"
        await eventually(leaving.has_exited)
        assert leaving.process.returncode == 0
        assert not await is_registered(stage, leaving)
        assert await stage.all_load_is_given_back()


async def test_a_hang_up_of_its_terminal_cuts_no_stream(stage: Stage) -> None:
    async with (
        another_gateway(stage.cluster, "staying") as staying,
        held_stream(stage.http, staying.url, stage.new_prompt(), max_tokens=60) as stream,
    ):
        staying.signal(signal.SIGHUP)
        assert (await stream.rest()).endswith("data: [DONE]\n\n")
        await ask(stage.http, staying.url, stage.new_prompt(), max_tokens=1)


async def test_what_outlasts_the_grace_period_is_told_so(stage: Stage) -> None:
    async with (
        another_gateway(stage.cluster, "leaving", timeouts={"grace_s": 0.6}) as leaving,
        held_stream(stage.http, leaving.url, stage.new_prompt()) as stream,
    ):
        plain = asyncio.ensure_future(
            stage.http.post(leaving.url + CHAT, json=chat(stage.new_prompt(), max_tokens=4000))
        )
        await eventually(lambda: stage.active_is(2))
        leaving.signal(signal.SIGTERM)
        assert last_event(await stream.rest())["error"]["code"] == "shutting_down"
        refused = await plain
        assert (refused.status_code, orjson.loads(refused.content)["error"]["code"]) == (503, "shutting_down")
        await eventually(leaving.has_exited)
        assert leaving.process.returncode == 0
        assert not await is_registered(stage, leaving)
        assert await stage.all_load_is_given_back(), "given back by the gateway itself, not by the reaper"


async def test_a_request_that_had_begun_to_come_is_answered(stage: Stage) -> None:
    async with another_gateway(stage.cluster, "leaving", timeouts={"grace_s": 20}) as leaving:
        address = urlsplit(leaving.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = orjson.dumps(chat(stage.new_prompt()))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: kvgate\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        writer.write(head[:20])
        async with httpx.AsyncClient() as newcomer:
            (await newcomer.get(f"{leaving.url}/health")).raise_for_status()  # so it has read the head's first bytes
            leaving.signal(signal.SIGTERM)
            await eventually(lambda: refuses(newcomer, leaving))
        writer.write(head[20:] + body)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b"connection: close" in answer
        writer.close()
        await writer.wait_closed()
        await eventually(leaving.has_exited)
        assert leaving.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_gateway_stops_at_once_with_exit_code_0(stage: Stage, number: signal.Signals) -> None:
    async with another_gateway(stage.cluster, "idle") as idle:
        idle.signal(number)
        await eventually(idle.has_exited, within_s=5)
        assert idle.process.returncode == 0
        assert not await is_registered(stage, idle)


async def test_a_gateway_stops_in_time_when_redis_hangs(stage: Stage) -> None:
    async with another_gateway(stage.cluster, "leaving") as leaving:
        stage.redis.pause()
        leaving.signal(signal.SIGTERM)
        await eventually(leaving.has_exited, within_s=10)
        assert leaving.process.returncode == 0
        stage.redis.resume()
