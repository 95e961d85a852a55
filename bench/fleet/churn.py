"""Workers that leave and come while sessions run, and runs that last."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.fleet.load import Outcome
from bench.fleet.parts import Used
from bench.fleet.peer import Run, load_of
from bench.fleet.stage import Stage

_LEAVES_S = 5.0
"""A worker goes on for at least this time after it left the EndpointSlices: gateways list them every second or two."""
_DRAIN_POLL_S = 0.5
_PARTS = 6
"""A run is shown in this many parts of equal length, so that a change in its course is seen."""
_OF_THE_WHOLE = ("sessions", "errors", "latest_s")
"""Figures that a part does not have."""


async def measure_in_parts(run: Run, staged: Stage, changes: int = 0) -> list[dict[str, Any]]:
    """Runs it on this stage. After a third of its sessions, `changes` workers leave; after two thirds, as many new ones
    come. Returns its row, and then one for each part. The variation of load is over the workers that stay."""
    workers = list(staged.fleet.urls)
    lasting = workers[: len(workers) - changes]
    load = load_of(run, staged)
    began_s = asyncio.get_running_loop().time()
    sends_s = run.sessions / run.sessions_per_s
    notes: dict[str, float] = {}
    async with staged.meter.measured() as used, asyncio.TaskGroup() as tasks:
        if changes:
            tasks.create_task(_change(staged, changes, sends_s / 3, began_s, notes))
        outcome = await load.run(run.sessions_per_s, run.sessions)
    what = run.described() | ({"changes": changes} if changes else {})
    whole = {**what, "part": "whole", **outcome.figures(lasting), **used.figures(len(outcome.sent)), **notes}
    parts = [what | _part(outcome, lasting, at, sends_s / _PARTS, used) for at in range(_PARTS)]
    return [whole | outcome.reasons(), *parts]


def _part(outcome: Outcome, workers: list[str], at: int, length_s: float, used: Used) -> dict[str, Any]:
    """The requests of this part, and the memory at its end. The last part has all late requests."""
    begin_s, end_s = at * length_s, (at + 1) * length_s if at + 1 < _PARTS else outcome.seconds
    figures = outcome.between(begin_s, end_s).figures(workers)
    told = {name: value for name, value in figures.items() if name not in _OF_THE_WHOLE}
    return {"part": f"{at + 1} of {_PARTS}", **told, **used.memory_at(end_s)}


async def _change(staged: Stage, count: int, after_s: float, began_s: float, notes: dict[str, float]) -> None:
    """Takes the last `count` workers away, and later adds as many. Like a deleted pod, a worker first leaves the
    EndpointSlices, then finishes what it runs, and then stops."""
    loop, fleet = asyncio.get_running_loop(), staged.fleet
    await asyncio.sleep(after_s)
    leaving = list(fleet.urls)[-count:]
    await loop.run_in_executor(None, fleet.publish, [each for each in fleet.urls if each not in leaving])
    left_s = loop.time()
    await asyncio.sleep(_LEAVES_S)
    while True:
        state = await loop.run_in_executor(None, fleet.state)
        if not any(state[each]["running"] + state[each]["waiting"] for each in leaving):
            break
        await asyncio.sleep(_DRAIN_POLL_S)
    await loop.run_in_executor(None, fleet.stop, leaving)
    notes["drained_s"] = round(loop.time() - left_s, 1)
    await asyncio.sleep(max(0.0, began_s + 2 * after_s - loop.time()))
    await loop.run_in_executor(None, fleet.start, count)
    await loop.run_in_executor(None, fleet.publish, list(fleet.urls))
    notes["added_s"] = round(loop.time() - began_s, 1)
