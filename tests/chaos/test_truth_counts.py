"""Blocks that exist or are reported more than once. A key leaves the map with its last block, not earlier or later."""

from __future__ import annotations

import asyncio
import random

from tests.chaos.test_truth_events import reports_of
from tests.chaos.truth_check import fitted
from tests.chaos.truth_stage import BLOCKS, TruthStage
from tests.chaos.truth_troubles import only_one_healthy
from tests.polling import eventually


async def test_a_block_that_is_there_several_times_is_gone_with_the_last(truth: TruthStage) -> None:
    text = fitted(truth.new_prompt(), last_block_tokens=0)
    answers = await asyncio.gather(*(truth.ask(text, number) for number in range(2)))
    replica = truth.replica(answers[0].replica)
    again = await truth.ask(text)
    assert {answer.replica for answer in (*answers, again)} == {replica.id}
    await truth.fill(replica, BLOCKS - 60)  # evicts the older blocks, so the twins are next
    for blocks in (*(3,) * 8, 60):
        await truth.fill(replica, blocks)
        await truth.settle([text])
    assert await truth.owners(text) == set()


async def test_a_prompt_that_went_to_several_replicas_at_once_is_known_on_all(truth: TruthStage) -> None:
    text = truth.new_prompt()
    answers = await asyncio.gather(*(truth.ask(text, number % 2, policy="round_robin") for number in range(6)))
    assert {answer.replica for answer in answers} == {"r0", "r1", "r2"}
    await truth.measured([text])
    await truth.settle([text])
    assert await truth.owners(text) == {"r0", "r1", "r2"}


async def test_reports_of_what_is_known_already_keep_no_key_alive(truth: TruthStage) -> None:
    """While a replica relearns, the same prompt is reported again and again until its claim is confirmed."""
    r0 = truth.replica("r0")
    await truth.fail(r0, "lose_events")
    for _ in range(2):
        await truth.ask_on(r0, truth.new_prompt(words=50))
    await eventually(lambda: truth.is_relearning(r0))
    texts = [truth.new_prompt(words=200) for _ in range(6)]
    async with only_one_healthy(truth, r0):
        for text in [*texts, *random.Random(1).choices(texts, k=24)]:
            await truth.ask(text)
            await asyncio.sleep(0.03)  # reports come at most every 100 ms: some now, others later
    await eventually(truth.is_exact_everywhere)
    assert len(await reports_of(truth, r0)) > 1
    await truth.settle(texts)
    await truth.fill(r0)
    await truth.settle(texts)
    assert not any([await truth.owners(text) & {"r0"} for text in texts])
