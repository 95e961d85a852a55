"""A limit on Redis counts Redis' time, and not that of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from coordinator.errors import StoreLate
from coordinator.redis.time_limit import IN_ALL, STEP_S, LoopLag, TimeLimits
from coordinator.redis.wire import Wire
from tests.redis_server import RedisServer

BUDGET_S = 0.02


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock and timers the test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.due_s = 0.0, 0.0
        self.run_timer: Callable[[], object] = lambda: None

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay, callback, *args, context=None):  # type: ignore[no-untyped-def]
        self.due_s, self.run_timer = self.now_s + delay, callback
        return asyncio.TimerHandle(self.due_s, callback, args, self)


@pytest.mark.parametrize(
    ("late_s", "ended_s", "cause"), [(0.0, BUDGET_S, "redis"), (0.004, 0.036, "redis"), (0.05, 0.11, "gateway")]
)
def test_time_in_which_this_process_did_not_run_is_not_redis_time(late_s: float, ended_s: float, cause: str) -> None:
    loop = SteppedLoop()
    future: asyncio.Future[None] = loop.create_future()
    TimeLimits().watch(future, BUDGET_S, IN_ALL * BUDGET_S, "no reply")
    while not future.done():
        loop.now_s = loop.due_s + late_s
        loop.run_timer()
    error = future.exception()
    assert isinstance(error, StoreLate)
    assert (pytest.approx(ended_s), cause) == (loop.now_s, error.cause)
    loop.close()


def test_each_future_has_its_own_time_and_one_that_is_done_has_none() -> None:
    loop, limits, late = SteppedLoop(), TimeLimits(), {}
    futures: list[asyncio.Future[None]] = [loop.create_future() for _ in range(3)]
    for number, future in enumerate(futures):
        limits.watch(future, BUDGET_S, IN_ALL * BUDGET_S, str(number))
        loop.now_s += STEP_S / 4
    futures[0].set_result(None)
    while not all(future.done() for future in futures):
        loop.now_s = loop.due_s
        loop.run_timer()
        late |= {number: loop.now_s for number, future in enumerate(futures) if future.done() and number not in late}
    assert late == {0: STEP_S, 1: pytest.approx(BUDGET_S + STEP_S / 4), 2: pytest.approx(BUDGET_S + STEP_S / 2)}
    watched = loop.due_s
    limits.watch(loop.create_future(), BUDGET_S, IN_ALL * BUDGET_S, "the next one")
    assert loop.due_s == watched + STEP_S
    loop.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reply_that_has_come_wins_over_a_timer_that_is_due(
    run: Callable[..., None], redis_server: RedisServer
) -> None:
    async def main() -> None:
        wire = await Wire.open(redis_server.url, 5.0, lambda _: None)
        reply = wire.send("PING", budget_s=BUDGET_S, at_once=True)
        until_s = time.monotonic() + 2 * IN_ALL * BUDGET_S
        while time.monotonic() < until_s:
            pass
        assert await reply == b"PONG"
        await wire.close()

    run(main())


def test_a_process_that_ran_late_gives_more_time_for_a_while_and_never_without_end() -> None:
    lag = LoopLag()
    assert lag.extended(BUDGET_S) == BUDGET_S
    lag.heard(0.01)
    assert lag.extended(BUDGET_S) == pytest.approx(2 * BUDGET_S)
    lag.heard(5.0)
    assert lag.extended(BUDGET_S) == IN_ALL * BUDGET_S
    for _ in range(1500):
        lag.heard(0.0)
    assert lag.extended(BUDGET_S) == pytest.approx(BUDGET_S, abs=1e-5)
