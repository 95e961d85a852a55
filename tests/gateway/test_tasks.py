"""Background tasks: what a failure of one task affects."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from gateway import tasks
from gateway.tasks import Tasks


async def test_a_loop_that_is_kept_begins_again_when_it_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_AGAIN_S", 0)
    begun, goes_on = 0, asyncio.Event()

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError("a record that nobody can read")
        goes_on.set()
        await asyncio.get_running_loop().create_future()

    kept = Tasks()
    with capture_logs() as logs:
        kept.keep(loop, "checks")
        await goes_on.wait()
    await kept.close()
    assert [(log["event"], log["task"]) for log in logs] == [("task failed", "checks")] * 2
    assert begun == 3
