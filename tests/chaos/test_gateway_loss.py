"""A gateway that dies or freezes loses only the streams that it was carrying."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.chaos.stage import Stage
from tests.cluster.clients import Load, ask, held_stream, is_complete, running_load
from tests.cluster.gateways import another_gateway
from tests.polling import eventually

GIVEN_BACK_WITHIN_S = 5.0
LONGER_THAN_A_LEASE_S = 5.0


async def test_what_a_killed_gateway_had_reserved_is_given_back_within_5_s(stage: Stage) -> None:
    async with another_gateway(stage.cluster, "doomed") as doomed, AsyncExitStack() as streams:
        for _ in range(4):
            await streams.enter_async_context(held_stream(stage.http, doomed.url, stage.new_prompt()))
        kept = await streams.enter_async_context(held_stream(stage.http, stage.urls[0], stage.new_prompt()))
        assert await stage.ledger.in_flight("doomed") == 4
        assert await stage.active_is(5)
        async with running_load(Load(stage.http, stage.urls), clients=2) as load:
            doomed.signal(signal.SIGKILL)
            await eventually(lambda: is_forgotten(stage, "doomed"), GIVEN_BACK_WITHIN_S)
        assert load.failures == []
        await eventually(lambda: stage.active_is(1))
        assert await kept.goes_on(), "the other gateway's stream is the one that is still counted"


async def is_forgotten(stage: Stage, gateway: str) -> bool:
    """Whether no record has the gateway's name. Fails if the sums are wrong meanwhile."""
    sums = await stage.ledger.sums()
    assert not sums.problems(), sums.problems()
    known = any(name.startswith(f"{gateway}.") for name in await stage.ledger.gateways())
    return not known and await stage.ledger.in_flight(gateway) == 0


async def test_after_a_gateway_froze_for_longer_than_its_lease_the_load_is_exactly_the_live_requests(
    stage: Stage,
) -> None:
    async with another_gateway(stage.cluster, "frozen") as frozen, AsyncExitStack() as streams:
        held = [
            await streams.enter_async_context(held_stream(stage.http, url, stage.new_prompt()))
            for url in (frozen.url, frozen.url, stage.urls[0], stage.urls[1])
        ]
        everyone = Load(stage.http, [*stage.urls, frozen.url])
        async with (
            running_load(everyone) as load,
            running_load(Load(stage.http, stage.urls, seed=2), clients=2) as rest,
        ):
            await eventually(lambda: load.answered > 20)
            frozen.signal(signal.SIGSTOP)
            await eventually(lambda: is_forgotten(stage, "frozen"), LONGER_THAN_A_LEASE_S)
            answered = rest.answered
            frozen.signal(signal.SIGCONT)
            await eventually(lambda: stage.ledger.in_flight("frozen"), LONGER_THAN_A_LEASE_S)
            await eventually(lambda: rest.answered > answered + 20)
        assert load.failures == []
        assert rest.failures == []
        await eventually(lambda: stage.active_is(len(held)))
        assert sum((await stage.ledger.sums()).backlog_tokens.values()) == 0
        await held.pop(0).hang_up()
        await eventually(lambda: stage.active_is(len(held)))


async def test_two_gateways_of_one_id_leave_each_others_reservations_alone(stage: Stage) -> None:
    """Two containers may have the same id by mistake. The store counts each life of a process separately."""
    async with (
        another_gateway(stage.cluster, "gw0", timeouts={"grace_s": 0.1}) as twin,
        held_stream(stage.http, twin.url, stage.new_prompt()),
        held_stream(stage.http, stage.urls[0], stage.new_prompt()),
    ):
        assert await stage.active_is(2)
        assert await stage.ledger.in_flight("gw0") == 2
        await asyncio.gather(*(ask(stage.http, url, stage.new_prompt()) for url in (twin.url, stage.urls[0])))
        await eventually(lambda: stage.active_is(2))
        twin.signal(signal.SIGTERM)
        await eventually(lambda: stage.active_is(1), GIVEN_BACK_WITHIN_S)
        assert is_complete(await ask(stage.http, stage.urls[0], stage.new_prompt()))


async def test_any_gateway_goes_on_with_a_conversation_that_a_killed_one_began(stage: Stage) -> None:
    text = stage.new_prompt()
    async with another_gateway(stage.cluster, "first") as first:
        began = await ask(stage.http, first.url, text)
        first.signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await ask(stage.http, first.url, text)
    went_on = await ask(stage.http, stage.urls[1], text)
    assert went_on.headers["x-kvgate-replica"] == began.headers["x-kvgate-replica"]
    assert int(went_on.headers["x-kvgate-matched-tokens"]) > 0
