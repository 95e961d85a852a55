"""An engine that restarts or forgets is never chosen for prompts that it no longer holds."""

from __future__ import annotations

import asyncio

from bench.cluster import SimReplica
from gateway.tasks import Tasks
from tests.chaos.truth_load import Askers
from tests.chaos.truth_stage import TruthStage
from tests.cluster.clients import held_stream
from tests.polling import eventually


async def test_an_engine_that_restarts_is_a_stranger_from_its_first_request_on(truth: TruthStage) -> None:
    """It is away until it counts as dead, as engines are that load a model."""
    r0 = truth.replica("r0")
    asked, unasked = await truth.warm(3, r0), await truth.warm(3, r0)
    async with Askers(truth, asked) as askers:
        before = (await truth.ledger.replicas())["r0"]
        r0.kill()
        await eventually(lambda: any(answer.replica != "r0" for answer in askers.answers))
        await eventually(lambda: is_in_state(truth, r0, "dead"))
        r0.start()
        await eventually(lambda: truth.listens(r0))
        first = await asyncio.gather(*(truth.ask(text, number % 2) for number, text in enumerate(unasked)))
        await eventually(truth.is_exact_everywhere)
        later = [await truth.ask_on(r0, text) for text in unasked]
        assert (await truth.ledger.replicas())["r0"].incarnation != before.incarnation
    assert not [answer for answer in (*first, *later) if answer.is_overpredicted]
    assert askers.overpredicted() == []
    await truth.settle([*asked, *unasked])


async def test_a_cache_that_was_cleared_is_empty_in_the_map_after_the_next_step(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    texts = await truth.warm(3, r0)
    cleared = (await truth.http.post(f"{r0.url}/reset_prefix_cache")).json()
    assert cleared == {"reset": True}
    await truth.fill(r0, blocks=1)  # the engine publishes the reset with its next step
    await truth.settle(texts)
    for text in texts:
        assert await truth.owners(text) == set()
        assert not (await truth.ask(text)).is_overpredicted
    await truth.settle(texts)


async def test_an_engine_that_sleeps_holds_nothing_in_the_map_although_it_says_so_only_when_it_is_awake(
    truth: TruthStage,
) -> None:
    r0 = truth.replica("r0")
    texts = await truth.warm(3, r0)
    await truth.http.post(f"{r0.url}/sleep")
    await eventually(lambda: is_in_state(truth, r0, "asleep"))
    await eventually(lambda: owns_nothing(truth, texts))
    await truth.http.post(f"{r0.url}/wake_up")
    await eventually(lambda: is_in_state(truth, r0, "ready"))
    await eventually(truth.is_exact_everywhere)
    for text in texts:
        assert not (await truth.ask(text)).is_overpredicted
    await truth.settle(texts)


async def test_a_long_prompt_stays_while_the_engine_works_although_its_server_answers_nothing(
    truth: TruthStage,
) -> None:
    """The engine is a process of its own: its agent hears of what it computes for others. A stream with two choices
    cannot go on elsewhere, so it keeps the engine busy."""
    r0 = truth.replica("r0")
    await truth.restart(r0, "--decode-s-per-token", "0.5")  # a block in 0.4 s
    running, long = await truth.warm(2, r0)
    tasks = Tasks()
    async with held_stream(truth.http, truth.urls[1], running, max_tokens=600, n=2) as begun:
        assert begun.replica == "r0"
        await truth.fail(r0, "block", seconds=8)
        asking = tasks.spawn(truth.ask(long), "ask")
        await eventually(lambda: is_in_state(truth, r0, "dead"))
        assert (await asking).replica == "r0"
    await truth.settle([running, long], complete=False)


async def is_in_state(truth: TruthStage, replica: SimReplica, state: str) -> bool:
    return (await truth.ledger.replicas())[replica.id].state == state


async def owns_nothing(truth: TruthStage, texts: list[str]) -> bool:
    return not any([await truth.owners(text) for text in texts])


async def test_a_cache_that_forgot_without_a_word_is_found_out_by_what_it_answers(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    texts = await truth.warm(5, r0)
    await truth.ask(texts[-1])  # gateways audit only a replica that has reported cached tokens
    entries = await entries_of(truth, r0)
    await truth.fail(r0, "amnesia")
    for text in texts[:3]:
        missed = await truth.ask(text)
        assert missed.is_overpredicted
    await truth.settle(texts, complete=False)
    assert await entries_of(truth, r0) > entries
    await eventually(lambda: truth.is_relearning(r0))
    assert not (await truth.owners(texts[3]))
    for text in texts:
        await truth.ask_on(r0, text)
    await truth.settle(texts)


async def entries_of(truth: TruthStage, replica: SimReplica) -> int:
    """The number of entries that the replica's agent has published."""
    return int(await truth.client.hget(truth.keys.entries, replica.id) or 0)
