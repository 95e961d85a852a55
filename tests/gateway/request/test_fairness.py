"""Fair shares: a client alone may take all units; while others want some, some are always left.

Fair turns: clients take turns one after the other, and no turn is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.fairness import WANTED_S, FairShares, FairTurns
from tests.polling import eventually

Began = list[str]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def taken_all(shares: FairShares, holder: str) -> int:
    """The number of units that one holder gets, one at a time, until it is refused."""
    count = 0
    while shares.try_take(holder, 1):
        count += 1
    return count


def test_a_client_alone_may_take_all() -> None:
    shares = FairShares(1024, Clock())
    assert taken_all(shares, "a") == 1024
    shares.give_back("a", 1)
    assert shares.try_take("a", 1)


def test_beside_others_a_greedy_client_leaves_room_for_the_next() -> None:
    shares = FairShares(1024, Clock())
    assert shares.try_take("other", 1)
    assert taken_all(shares, "greedy") < 1024 * 0.9
    assert all(shares.try_take(f"new {number}", 1) for number in range(100))


def test_what_a_client_that_took_all_gives_back_is_for_those_that_it_kept_out() -> None:
    clock = Clock()
    shares = FairShares(64, clock)
    assert taken_all(shares, "greedy") == 64
    assert not shares.try_take("other", 1)
    shares.give_back("greedy", 1)
    assert not shares.try_take("greedy", 1)
    assert shares.try_take("other", 1)


def test_a_client_that_asked_long_ago_bounds_nobody() -> None:
    clock = Clock()
    shares = FairShares(64, clock)
    taken_all(shares, "greedy")
    assert not shares.try_take("other", 1)
    clock.now_s += WANTED_S + 1
    shares.give_back("greedy", 1)
    assert shares.try_take("greedy", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 5)), max_size=60), st.integers(1, 12))
def test_what_is_taken_is_never_more_than_there_is_and_all_of_it_comes_back(
    steps: list[tuple[str, int]], limit: int
) -> None:
    shares = FairShares(limit, Clock())
    held = dict.fromkeys("abc", 0)
    for holder, count in steps:
        if count > 0 and shares.try_take(holder, count):
            held[holder] += count
        elif count < 0 and held[holder] >= -count:
            shares.give_back(holder, -count)
            held[holder] += count
        assert shares.taken == sum(held.values()) <= limit


async def started(turns: FairTurns, holder: str, begun: Began, end: asyncio.Event) -> asyncio.Task[None]:
    """Starts a task that takes a turn as soon as it can, and keeps it until `end`."""

    async def work() -> None:
        async with turns.take(holder):
            begun.append(holder)
            await end.wait()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    return task


def free(turns: FairTurns) -> Callable[[], bool]:
    return lambda: repr(turns) == "<FairTurns 1 free, waiting: {}>"


async def test_whoever_waits_with_less_waits_for_one_turn_of_each_other_client() -> None:
    turns, begun, end = FairTurns(1), Began(), asyncio.Event()
    for _ in range(6):
        await started(turns, "greedy", begun, end)
    await started(turns, "other", begun, end)
    await started(turns, "third", begun, end)
    end.set()
    await eventually(free(turns))
    assert begun == ["greedy", "greedy", "other", "third", "greedy", "greedy", "greedy", "greedy"]


async def test_a_client_that_hangs_up_leaves_the_line() -> None:
    turns, begun, end = FairTurns(1), Began(), asyncio.Event()
    await started(turns, "a", begun, end)
    waiting = await started(turns, "b", begun, end)
    await started(turns, "c", begun, end)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    end.set()
    await eventually(free(turns))
    assert begun == ["a", "c"]


async def test_clients_that_hang_up_together_lose_nobodys_place() -> None:
    turns, begun, end = FairTurns(2), Began(), asyncio.Event()
    gone = [await started(turns, "crowd", begun, end) for _ in range(8)]
    other = await started(turns, "other", begun, asyncio.Event())
    for task in gone:
        task.cancel()  # tasks with a turn and tasks that wait, before any of them runs again
    await asyncio.gather(*gone, return_exceptions=True)
    await eventually(lambda: begun[-1] == "other")
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert repr(turns) == "<FairTurns 2 free, waiting: {}>"


async def test_a_client_that_hangs_up_as_its_turn_comes_passes_it_on() -> None:
    turns, begun = FairTurns(1), Began()
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
