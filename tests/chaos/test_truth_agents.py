"""An agent that dies or hangs leaves no stale entries in the map, and removes no entry that is still true."""

from __future__ import annotations

import copy
import signal

from bench.cluster import SimReplica
from tests.chaos.truth_stage import TruthStage
from tests.polling import eventually


async def test_the_map_is_right_while_all_goes_well(truth: TruthStage) -> None:
    texts = await truth.warm(6)
    for text in texts:
        (owner,) = await truth.owners(text)
        answer = await truth.ask(text, gateway=1)
        assert (answer.replica, answer.decision.split("state=")[1]) == (owner, "exact")
        assert answer.cached_tokens >= answer.prompt_tokens - 16
        assert not answer.is_overpredicted
    await truth.settle(texts)


async def test_an_agent_that_was_killed_learns_what_went_meanwhile_and_drops_nothing_else(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    await truth.forget_chains()
    agent = truth.cluster.agent("r0")
    async with truth.staying_resident(kept):
        agent.kill()
        await truth.crowd_out(r0)
        agent.start()
        await eventually(lambda: is_followed_by_another(truth, r0, ""))
        await truth.settle([old, *kept])
    assert await truth.owners(old) == set()


async def test_an_agent_that_is_killed_again_before_it_knows_all_loses_nothing_either(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    await truth.forget_chains()
    agent = truth.cluster.agent("r0")
    async with truth.staying_resident(kept):
        first = (await truth.agent_record(r0)).agent
        agent.kill()
        agent.start()
        await eventually(lambda: is_followed_by_another(truth, r0, first))
        agent.kill()
        second = (await truth.agent_record(r0)).agent
        await truth.crowd_out(r0)
        agent.start()
        await eventually(lambda: is_followed_by_another(truth, r0, second))
        await truth.settle([old, *kept])
    assert await truth.owners(old) == set()


async def test_an_agent_that_hung_is_fenced_when_it_comes_back(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    hung = truth.cluster.agent("r0")
    second = copy.copy(hung)
    async with truth.staying_resident(kept):
        first = (await truth.agent_record(r0)).agent
        hung.signal(signal.SIGSTOP)
        try:
            second.start()
            await truth.crowd_out(r0)
            await eventually(lambda: is_followed_by_another(truth, r0, first))
            await truth.settle([old, *kept])
            for text in kept:
                await truth.ask(text)  # so that these are not evicted next
            await truth.ask_on(r0, old)
            await truth.measured([old])
            let_go = hung.log.read_text().count("let go")
            hung.signal(signal.SIGCONT)
            await eventually(lambda: hung.log.read_text().count("let go") > let_go)
            await truth.settle([old, *kept])  # the hung agent's data about the old prompt is out of date
            assert "r0" in await truth.owners(old)
        finally:
            second.kill()
        await eventually(truth.is_exact_everywhere)  # the first agent takes over again
        await truth.settle([old, *kept])


async def is_followed_by_another(truth: TruthStage, replica: SimReplica, agent: str) -> bool:
    """Whether a replica has a different agent now, and every gateway hears it."""
    return (await truth.agent_record(replica)).agent != agent and await truth.is_exact_everywhere()
