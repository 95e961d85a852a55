"""Time limits of requests: they are exact enough, and apply only to the task that set them."""

from __future__ import annotations

import asyncio

import pytest

from gateway.deadlines import Deadlines


def this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def test_what_takes_too_long_is_a_timeout() -> None:
    with pytest.raises(TimeoutError), Deadlines().within(0.05, this_task()):
        await asyncio.sleep(60)
    assert this_task().cancelling() == 0


async def test_what_is_in_time_is_not_and_leaves_nothing_behind() -> None:
    deadlines = Deadlines()
    with deadlines.within(0.05, this_task()):
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)  # past the limit
    assert deadlines._timer is None


async def test_no_limit_is_none() -> None:
    with Deadlines().within(None, this_task()):
        await asyncio.sleep(0.15)


async def test_the_inner_limit_ends_what_is_inside_and_the_outer_goes_on() -> None:
    deadlines, reached = Deadlines(), []
    with deadlines.within(30, this_task()):
        try:
            with deadlines.within(0.05, this_task()):
                await asyncio.sleep(60)
        except TimeoutError:
            reached.append("inner")
        await asyncio.sleep(0.1)
        reached.append("outer")
    assert reached == ["inner", "outer"]


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def work() -> None:
        with Deadlines().within(30, this_task()):
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_timer_serves_them_all() -> None:
    deadlines = Deadlines()

    async def work(limit_s: float) -> str:
        try:
            with deadlines.within(limit_s, this_task()):
                await asyncio.sleep(0.5)
        except TimeoutError:
            return "late"
        return "in time"

    found = await asyncio.gather(*(work(limit_s) for limit_s in (0.05, 30, 0.1, 30)))
    assert found == ["late", "in time", "late", "in time"]


async def test_a_limit_that_two_end_at_once_is_one_timeout() -> None:
    limit = Deadlines().within(30, this_task())
    for _ in range(2):
        asyncio.get_running_loop().call_soon(limit.expire)
    with pytest.raises(TimeoutError), limit:
        await asyncio.sleep(60)
    assert this_task().cancelling() == 0


async def test_a_limit_that_pauses_begins_anew() -> None:
    """A replica is not to blame for the time of another one that computes its prompt."""
    reached: list[str] = []

    async def paused() -> None:
        with Deadlines().within(0.05, this_task()) as limit:
            limit.pause()
            await asyncio.sleep(0.2)  # past the limit
            reached.append("the end of the pause")
            limit.restart()
            await asyncio.sleep(60)
            reached.append("the end")

    with pytest.raises(TimeoutError):
        await paused()
    assert reached == ["the end of the pause"]
