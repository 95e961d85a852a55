"""Events get lost, arrive twice or arrive late: the map stays right, or is soon right again."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from bench.cluster import SimReplica
from tests.chaos.truth_stage import TruthStage
from tests.polling import eventually


async def test_batches_that_did_not_arrive_are_asked_for_again(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    texts = await truth.warm(2, r0)
    await truth.fail(r0, "drop_events", count=3)
    for _ in range(4):
        texts.append(truth.new_prompt())
        await truth.ask_on(r0, texts[-1])
    await truth.fill(r0, blocks=200)
    await eventually(lambda: is_over(truth, r0))
    await truth.settle(texts)


async def test_the_last_batch_before_a_silence_is_missed_too(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    async with truth.staying_resident(kept):
        await truth.fail(r0, "drop_events", count=-1)
        await truth.crowd_out(r0)
        await truth.settle([old, *kept])
        assert await truth.owners(old) == set()


@pytest.mark.parametrize("fault", ["duplicate_events", "delay_events"])
async def test_batches_that_come_twice_or_after_their_successors_change_nothing(truth: TruthStage, fault: str) -> None:
    r0 = truth.replica("r0")
    await truth.fail(r0, fault, count=-1)
    texts = [truth.new_prompt() for _ in range(5)]
    for text in (*texts, *texts[-2:]):
        await truth.ask_on(r0, text)
    await truth.settle(texts)
    await truth.fill(r0, blocks=200)
    await truth.settle(texts)
    await truth.fill(r0)
    await truth.settle(texts)
    assert not any([await truth.owners(text) & {"r0"} for text in texts])


async def test_an_agent_that_was_slow_for_a_while_catches_up(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    agent = truth.cluster.agent("r0")
    async with truth.staying_resident(kept):
        agent.signal(signal.SIGSTOP)
        await truth.crowd_out(r0)
        for text in kept:
            await truth.ask(text)
        new = truth.new_prompt(words=50)
        await truth.ask_on(r0, new)
        agent.signal(signal.SIGCONT)
        await truth.settle([old, *kept, new])


# -- events that cannot be replayed --------------------------------------------------------------------------------


async def test_batches_that_are_lost_for_good_void_all_and_requests_tell_it_again(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    texts = await truth.warm(4, r0)
    reports = await reports_of(truth, r0)
    await truth.fail(r0, "lose_events")
    await truth.ask_on(r0, truth.new_prompt(words=50))
    await truth.ask_on(r0, truth.new_prompt(words=50))
    await eventually(lambda: truth.is_relearning(r0))
    await truth.settle(texts, complete=False)

    async def is_void() -> bool:  # the agent may have been relearning before
        return not any([await truth.owners(text) & {"r0"} for text in texts])

    await eventually(is_void)
    for text in texts:
        await truth.ask_on(r0, text)
        await asyncio.sleep(0.11)  # gateways ask for a report at most every 100 ms
    await truth.settle(texts)
    assert await reports_of(truth, r0) - reports


async def test_reports_are_asked_for_at_most_every_100_ms_and_of_no_engine_that_is_known(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    known = await reports_of(truth, r0)
    await ask_many(truth, 20)
    assert await reports_of(truth, r0) <= known
    await truth.fail(r0, "lose_events")
    await truth.ask_on(r0, truth.new_prompt(words=50))
    await truth.ask_on(r0, truth.new_prompt(words=50))

    async def may_be_asked() -> bool:
        record = await truth.agent_record(r0)
        return record.is_relearning and not record.waiting  # it may have been read while the first requests waited

    await eventually(may_be_asked)
    before = await reports_of(truth, r0)
    await asyncio.sleep(0.11)  # a report may have been asked for just now
    elapsed_s = await ask_many(truth, 40)
    asked = await reports_of(truth, r0) - before
    assert 0 < len(asked) <= elapsed_s / 0.1 + 1


async def test_a_ring_too_short_for_what_an_agent_missed_voids_all(truth: TruthStage) -> None:
    r0 = await with_short_ring(truth)
    texts = await truth.warm(3, r0)
    agent = truth.cluster.agent("r0")
    agent.kill()
    await truth.fill(r0, blocks=150)
    await asyncio.gather(*(truth.fill(r0, blocks=2) for _ in range(4)))
    agent.start()
    await eventually(lambda: truth.is_relearning(r0))
    await truth.settle(texts, complete=False)
    for text in texts:
        await truth.ask_on(r0, text)
        await asyncio.sleep(0.11)
    await truth.settle(texts)


async def test_a_short_ring_voids_nothing_where_an_agent_missed_nothing(truth: TruthStage) -> None:
    r0 = await with_short_ring(truth)
    texts = await truth.warm(4, r0)
    await truth.forget_chains()
    agent = truth.cluster.agent("r0")
    async with truth.staying_resident(texts):
        first = (await truth.agent_record(r0)).agent
        agent.kill()
        agent.start()
        await eventually(lambda: is_another(truth, r0, first))
        await eventually(lambda: truth.is_relearning(r0))
        await truth.settle(texts)
    await truth.fill(r0)
    await truth.settle(texts)


async def with_short_ring(truth: TruthStage) -> SimReplica:
    """Restarts r0 with a ring of two batches, and waits until the gateways hear its agent."""
    r0 = truth.replica("r0")
    await truth.restart(r0, "--replay-steps", "2")
    for _ in range(2):  # an agent that has just connected hears late, and so short a ring replays nothing
        seq = (await truth.agent_record(r0)).seq
        await truth.fill(r0, blocks=2)
        await eventually(lambda seq=seq: has_come_further(truth, r0, seq))
    return r0


async def has_come_further(truth: TruthStage, replica: SimReplica, seq: int) -> bool:
    """Whether the replica's agent has processed events after batch `seq`."""
    return (await truth.agent_record(replica)).seq > seq


async def is_over(truth: TruthStage, replica: SimReplica) -> bool:
    """Whether the replica's faults have all happened."""
    return not (await state_of(truth, replica))["failing"]


async def is_another(truth: TruthStage, replica: SimReplica, agent: str) -> bool:
    return (await truth.agent_record(replica)).agent != agent and await truth.is_exact_everywhere()


async def reports_of(truth: TruthStage, replica: SimReplica) -> set[str]:
    """The replica's recent requests that asked it to report the blocks that it reuses."""
    recent = (await state_of(truth, replica))["recent"]
    return {one["request_id"] for one in recent if one["vllm_xargs"].get("kv_cache_report_mode") == "full"}


async def state_of(truth: TruthStage, replica: SimReplica) -> dict[str, Any]:
    found: dict[str, Any] = (await truth.http.get(f"{replica.url}/sim/state")).json()
    return found


async def ask_many(truth: TruthStage, count: int) -> float:
    """Sends this many new prompts at once. Returns the seconds that they took."""
    started = time.monotonic()
    await asyncio.gather(*(truth.ask(truth.new_prompt(words=50), number % 2) for number in range(count)))
    return time.monotonic() - started
