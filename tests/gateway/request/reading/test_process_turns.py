"""Turns: one client after the other, and nobody's place is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.request.reading.process_turns import Turns
from tests.polling import eventually

Began = list[str]


async def started(turns: Turns, holder: str, begun: Began, end: asyncio.Event) -> asyncio.Task[None]:
    """A task that takes a turn as soon as it can and keeps it until `end`."""

    async def work() -> None:
        async with turns.of(holder):
            begun.append(holder)
            await end.wait()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    return task


def free(turns: Turns) -> Callable[[], bool]:
    return lambda: repr(turns) == "<Turns 1 free, waiting: {}>"


async def test_whoever_waits_with_less_waits_for_one_turn_of_each_other_client() -> None:
    turns, begun, end = Turns(1), Began(), asyncio.Event()
    for _ in range(6):
        await started(turns, "greedy", begun, end)
    await started(turns, "other", begun, end)
    await started(turns, "third", begun, end)
    end.set()
    await eventually(free(turns))
    assert begun == ["greedy", "greedy", "other", "third", "greedy", "greedy", "greedy", "greedy"]


async def test_a_client_that_hangs_up_leaves_the_line() -> None:
    turns, begun, end = Turns(1), Began(), asyncio.Event()
    await started(turns, "a", begun, end)
    waiting = await started(turns, "b", begun, end)
    await started(turns, "c", begun, end)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    end.set()
    await eventually(free(turns))
    assert begun == ["a", "c"]


async def test_clients_that_hang_up_together_lose_nobodys_place() -> None:
    turns, begun, end = Turns(2), Began(), asyncio.Event()
    gone = [await started(turns, "crowd", begun, end) for _ in range(8)]
    other = await started(turns, "other", begun, asyncio.Event())
    for task in gone:
        task.cancel()  # those that hold a place and those that wait, before any of them runs again
    await asyncio.gather(*gone, return_exceptions=True)
    await eventually(lambda: begun[-1] == "other")
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert repr(turns) == "<Turns 2 free, waiting: {}>"


async def test_a_client_that_hangs_up_as_its_turn_comes_passes_it_on() -> None:
    turns, begun = Turns(1), Began()
    first, forever = asyncio.Event(), asyncio.Event()
    await started(turns, "a", begun, first)
    waiting = await started(turns, "b", begun, forever)
    await started(turns, "c", begun, first)
    first.set()
    await asyncio.sleep(0)
    waiting.cancel()
    await eventually(free(turns))
    assert begun[0] == "a"
    assert begun[-1] == "c"
