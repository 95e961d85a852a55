"""Measures one fault, from an empty cluster to its row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.faults import queue, quiet
from bench.faults.fault import Fault
from bench.faults.load import Load
from bench.faults.problems import ProblemSampler, Wrong, placed_wrong, right_after_s
from bench.faults.queue import QueueSampler
from bench.faults.row import Row
from bench.faults.stage import NO_MORE, Stage, running_stage
from bench.faults.verdicts import Seen, Strike, Verdict, verdict
from bench.machine import IdleShare
from gateway.tasks import Tasks

_FAULT_WITHIN_S = 150.0
_RIGHT_WITHIN_S = 25.0
_ENDS_WITHIN_S = 15.0
"""An answer takes one or two seconds. Answers that take this much longer are not waited for."""


class NotWhole(Exception):
    """The cluster was not whole before the fault, so the fault cannot be measured."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one run: when the fault struck, when it was over, and when the load stopped."""

    struck_s: float
    over_s: float
    asked_until_s: float


async def measure(fault: Fault, row: Row, folder: Path) -> Row:
    """`row` names the fault, the gateways and the code. Raises NotWhole, TimeoutError if a process does not start,
    OSError, and StoreError if the fault needs Redis and Redis does not answer."""
    idle = IdleShare()
    settings = queue.SETTINGS if row.waits else NO_MORE
    async with running_stage(folder, row.gateways, fault.layout, row.replicas, settings) as stage:
        began_s = stage.now_s()
        load, tasks = Load(stage.http, stage.balancer, queue.CLIENTS if row.waits else 0), Tasks()
        sampler, queue_sampler = ProblemSampler(stage, load), QueueSampler(stage)
        try:
            await load.warm_up()
            tasks.spawn(stage.balancer.look(stage.http), "balancer")
            samplings = [tasks.spawn(sampler.run(), "problem sampler")]
            if row.waits:
                samplings.append(tasks.spawn(queue_sampler.run(), "queue sampler"))
            load.start()
            times = await _struck(fault, stage, load, sampler)
            for sampling in samplings:
                sampling.cancel()
            load.stop()
            await load.finish(_ENDS_WITHIN_S)
            left, seats_left = await quiet.left_in_sums(stage), await quiet.left_in_queue(stage)
            predicted, wrong = await quiet.predictions(stage, load)
        finally:
            await tasks.close()
            await load.finish(0)
        all_wrong = [*sampler.wrong, *placed_wrong(load.seen)]
        found = _judged_requests(load.seen, stage.strikes, fault.late_after_s + (queue.QUEUE_S if row.waits else 0))
        found |= _judged_time(fault, times, all_wrong)
        found |= _judged_queue(fault, times, queue_sampler, load.seen) if row.waits else {}
        return replace(
            row,
            **found,
            load_left=left,
            seats_left=seats_left,
            predicted=predicted,
            wrong=tuple(wrong),
            idle_share=idle(),
            wall_s=stage.now_s() - began_s,
        ).judged()


async def _struck(fault: Fault, stage: Stage, load: Load, sampler: ProblemSampler) -> Times:
    if not await sampler.until_right(_RIGHT_WITHIN_S):
        raise NotWhole([*sampler.wrong, *placed_wrong(load.seen)][-1].what)
    sampler.wrong.clear()
    struck_s = stage.now_s()
    async with asyncio.timeout(_FAULT_WITHIN_S):
        await fault.inflict(stage)
    over_s = stage.now_s()
    await sampler.until_right(_RIGHT_WITHIN_S)
    return Times(struck_s, over_s, stage.now_s())


def _judged_requests(seen: Sequence[Seen], strikes: Sequence[Strike], late_after_s: float) -> dict[str, Any]:
    verdicts = [(one, verdict(one, strikes, late_after_s)) for one in seen]
    counts = Counter(said for _, said in verdicts)
    kinds = Counter(f"{said.value}: {one.detail or one.end.value}" for one, said in verdicts if said.is_failure)
    late = [one.late_s for one, said in verdicts if said is Verdict.LATE]
    waits = [one.waited_s for one, said in verdicts if said is not Verdict.LATE_EXCUSED]
    went_on = sum(one.went_on for one in seen)
    return {
        "requests": len(seen),
        "failed": counts[Verdict.LOST] + counts[Verdict.SAVABLE],
        "savable": counts[Verdict.SAVABLE],
        "late": len(late),
        "late_excused": counts[Verdict.LATE_EXCUSED],
        "latest_s": max(late, default=0.0),
        "longest_wait_s": max(waits, default=0.0),
        "kinds": dict(kinds),
        "states": dict(Counter(one.state for one in seen if one.state)),
        "streams_broken": went_on + sum(one.detail == "stream_broken" for one in seen),
        "streams_went_on": went_on,
    }


def _judged_time(fault: Fault, times: Times, wrong: Sequence[Wrong]) -> dict[str, Any]:
    since_s = times.struck_s if fault.counts_from_strike else times.over_s
    after_s = right_after_s(wrong, since_s, times.asked_until_s)
    until_s = times.asked_until_s if after_s is None else since_s + after_s
    last = max((each for each in wrong if since_s <= each.at_s <= until_s), key=lambda each: each.at_s, default=None)
    return {
        "right_after_s": after_s,
        "last_wrong": last.what if last is not None else "",
        "goal_s": fault.goal_s,
        "counts_from_strike": fault.counts_from_strike,
    }


def _judged_queue(fault: Fault, times: Times, sampler: QueueSampler, seen: Sequence[Seen]) -> dict[str, Any]:
    waited, placed = queue.waited(seen)
    over = queue.over_cap(sampler.looks, seen)
    return {
        "waiting": sampler.waiting_at(times.struck_s),
        "waited": waited,
        "placed": placed,
        "cap": queue.CAP,
        "most_active": max((count for look in sampler.looks for count in look.active.values()), default=0),
        "most_running": sampler.most_running,
        "over_cap_until_s": max(over) - times.over_s if over else None,
        "over_cap_goal_s": queue.CAP_AGAIN_WITHIN_S if fault.loses_load else None,
    }
