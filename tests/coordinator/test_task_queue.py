"""Tasks take turns within a bounded share of Redis' time: none waits for a long one, and none is lost."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as redis

from coordinator.maintenance import held_keys, worker
from coordinator.maintenance.task_queue import REST_PER_WORK, TaskQueue
from coordinator.maintenance.worker import Worker
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, register
from tests.coordinator.stream import followed
from tests.polling import eventually


class Pieces:
    """A task of so many pieces, which are written to a list as they are done."""

    def __init__(self, name: str, count: int, done: list[str], is_urgent: bool = True) -> None:
        self.name, self.is_urgent = name, is_urgent
        self._left = count
        self._done = done

    async def do_piece(self) -> bool:
        self._done.append(self.name)
        self._left -= 1
        return self._left == 0


def until(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_short_task_does_not_wait_for_long_ones_that_came_before_it() -> None:
    queue, done = TaskQueue("m"), list[str]()
    for name in ("a", "b", "c", "d", "e"):
        queue.add(Pieces(name, 50, done))
    queue.add(Pieces("short", 1, done))
    queue.add(Pieces("routine", 1, done, is_urgent=False))
    await queue.work(until(60))
    assert max(done.index("short"), done.index("routine")) < 12
    assert len(done) == 252
    assert not queue
    assert queue.lag_s() == 0


async def test_an_urgent_task_takes_the_place_of_a_routine_one_and_of_no_other() -> None:
    queue, done = TaskQueue("m"), list[str]()
    routine, urgent = Pieces("a", 9, done, is_urgent=False), Pieces("a", 3, done)
    queue.add(routine)
    queue.add(urgent)
    queue.add(routine)
    queue.add(Pieces("a", 9, done))
    await queue.work(until(60))
    assert done == ["a"] * 3


async def test_a_round_that_is_cut_off_goes_on_with_the_next_task() -> None:
    queue, done = TaskQueue("m"), list[str]()
    for number in range(10):
        queue.add(Pieces(str(number), 100, done, is_urgent=False))
    for _ in range(5):
        await queue.work(until(1e-9))
    assert len(done) == 20
    assert {name: done.count(name) for name in done} == {str(number): 2 for number in range(10)}


async def test_tasks_rest_for_longer_than_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, rests = asyncio.get_running_loop(), list[float]()
    now_s = 100.0

    class Slow(Pieces):
        async def do_piece(self) -> bool:
            nonlocal now_s
            now_s += 0.002
            return await super().do_piece()

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    queue = TaskQueue("m")
    queue.add(Slow("a", 3, []))
    monkeypatch.setattr(loop, "time", lambda: now_s, raising=False)
    monkeypatch.setattr(asyncio, "sleep", rest)
    await queue.work(1000.0)
    assert rests == pytest.approx([0.002 * REST_PER_WORK] * 3)


async def test_every_replica_gets_its_turn_however_much_others_hold(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each heartbeat looks at two of six replicas; a pass over one of them takes far longer than all have to wait."""
    monkeypatch.setattr(held_keys, "_PIECE", 1)
    monkeypatch.setattr(worker, "_WORK_S", 0.05)
    monkeypatch.setattr(worker, "_LOOKS", 2)
    for name in await register(pool, 6):
        await followed(client, name)
        count = 5000 if name == "r0" else 1
        await client.zadd(KEYS.held(name), {f"{i:031x}{name[-1]}": i + 1 for i in range(count)})
    maintenance = Worker(pool)

    async def others_hold_nothing() -> bool:
        await maintenance.tick()
        return not any([await client.zcard(KEYS.held(f"r{i}")) for i in range(1, 6)])

    await eventually(others_hold_nothing)
    assert 0 < await client.zcard(KEYS.held("r0")) < 5000
    assert pool.maintenance_lag_s is not None
    assert pool.maintenance_lag_s > 0
