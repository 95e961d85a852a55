"""Redis' clock steps ahead and back under load, as in failovers to hosts with wrong clocks. No request fails, and the
state is right again within seconds."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from bench.cluster import Daemon
from bench.faults.stepped_clock import OFFSET_KEY
from tests.chaos.truth_stage import TruthStage
from tests.cluster.clients import Load, held_stream, running_load
from tests.polling import eventually

STEPPED = (sys.executable, "-m", "bench.faults.stepped_clock")
HOUR_MS = 3_600_000
RIGHT_WITHIN_S = 5.0
Step = Callable[[int], Awaitable[int]]


@asynccontextmanager
async def stepping(truth: TruthStage) -> AsyncIterator[Step]:
    """Runs the cluster's processes on a clock that the test can step. Yields a function that steps it by some ms."""
    daemons = [*truth.cluster.gateway_processes, *truth.cluster.agents]
    for daemon in daemons:
        daemon.stop()
        daemon.start(*STEPPED, *options_of(daemon))
    try:
        await eventually(truth.is_exact_everywhere)
        yield lambda ms: truth.client.incrby(OFFSET_KEY, ms)
    finally:
        for daemon in daemons:
            daemon.stop()
        await truth.client.delete(OFFSET_KEY)
        for daemon in daemons:
            daemon.start()


def options_of(daemon: Daemon) -> tuple[str, ...]:
    """A daemon's arguments for `kvgate`, with the subcommand first."""
    return daemon.command[daemon.command.index("gateway.ops.cli") + 1 :]


@pytest.mark.slow
async def test_an_hour_ahead_and_back_under_load_fails_no_request_and_leaves_nothing_behind(truth: TruthStage) -> None:
    async with stepping(truth) as step:
        texts = await truth.warm(2)
        async with running_load(Load(truth.http, truth.urls[:1])) as load:
            await step(HOUR_MS)
            await eventually(truth.is_exact_everywhere)
            answered = load.answered
            await eventually(lambda: load.answered > answered + 20)
            ahead_ms = int((await truth.client.time())[0]) * 1000 + HOUR_MS
            await truth.client.hset(truth.keys.breakers, "r2", f"3 {ahead_ms + 1000} 0")
            doomed = truth.cluster.gateway_processes[1]
            async with held_stream(truth.http, truth.urls[1], truth.new_prompt()):
                doomed.signal(signal.SIGKILL)
                assert await truth.ledger.in_flight("gw1") == 1
                await step(-HOUR_MS)
                await eventually(lambda: is_forgotten(truth, "gw1"), RIGHT_WITHIN_S)
            await eventually(lambda: no_breaker_stands(truth), RIGHT_WITHIN_S)
            doomed.kill()
            doomed.start(*STEPPED, *options_of(doomed))
            await eventually(truth.is_exact_everywhere)
        assert load.failures == []
        await eventually(truth.all_load_is_given_back)
        await truth.settle(texts)


async def is_forgotten(truth: TruthStage, gateway: str) -> bool:
    known = any(name.startswith(f"{gateway}.") for name in await truth.ledger.gateways())
    return not known and await truth.ledger.in_flight(gateway) == 0


async def no_breaker_stands(truth: TruthStage) -> bool:
    return not await truth.ledger.breakers()


@pytest.mark.slow
async def test_after_a_step_back_a_replica_that_had_just_begun_to_live_is_believed_to_hold_what_it_does(
    truth: TruthStage,
) -> None:
    """The replica's life began at a time that is in the future after the step."""
    r1 = truth.replica("r1")
    async with stepping(truth) as step:
        await step(HOUR_MS)
        await truth.restart(r1)
        async with running_load(Load(truth.http, truth.urls)) as load:
            await step(-HOUR_MS)
            await eventually(lambda: load.answered > 20)
        assert load.failures == []
        texts = await truth.warm(2, r1)  # under load the engine could evict them
        async with truth.staying_resident(texts):
            await asyncio.sleep(2.0)  # four rounds of maintenance
        await eventually(truth.is_exact_everywhere)
        await truth.settle(texts)
