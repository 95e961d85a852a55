"""The scheduler, run step by step without a clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.agent.kv_events import Batch, Stored, decode
from gateway.simulator.answers import text_answer
from gateway.simulator.engine import Generation, SimEngine
from gateway.simulator.events import payload
from gateway.simulator.prompt import PromptBuilder
from gateway.simulator.sequence import EventTag, TokenSequence
from gateway.simulator.settings import SimSettings


def an_engine(published: list[Batch] | None = None, **settings: Any) -> SimEngine:
    """An engine. If `published` is given, the engine appends its batches of KV events to it."""
    defaults = {"block_size": 4, "num_gpu_blocks": 64, "max_num_batched_tokens": 32}
    publish = None if published is None else lambda events: published.append(decode(payload(events, 0)))
    return SimEngine(SimSettings(**{**defaults, **settings}), lambda _: None, publish)


def generate(
    engine: SimEngine, tokens: int, name: str = "a", max_tokens: int = 2, full_report: bool = False
) -> Generation:
    builder = PromptBuilder()
    builder.text(name * tokens * 4)
    prompt = builder.build()
    tag = EventTag("session", full_report)
    generation = Generation(engine, [prompt], [text_answer(prompt, max_tokens)], tag=tag)
    generation.start()
    return generation


def submit(
    engine: SimEngine, tokens: int, name: str = "a", max_tokens: int = 2, full_report: bool = False
) -> TokenSequence:
    return generate(engine, tokens, name, max_tokens, full_report).sequences[0]


def step(engine: SimEngine) -> int:
    """Runs one step and returns its prefill tokens."""
    batch, prefill_tokens = engine.schedule()
    engine.finish_step(batch)
    return prefill_tokens


def run(engine: SimEngine) -> list[int]:
    steps = []
    while engine.waiting or engine.running:
        steps.append(step(engine))
        assert len(steps) < 1000
    return steps


async def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    engine = an_engine()
    short = submit(engine, 8, "s", max_tokens=4)
    step(engine)
    long = submit(engine, 70, "l")
    assert [step(engine) for _ in range(3)] == [32, 32, 6]
    assert (short.produced, long.produced) == (4, 1)


async def test_two_equal_prompts_that_arrive_together_share_their_blocks() -> None:
    engine = an_engine()
    first, second = submit(engine, 18), submit(engine, 18)
    step(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)
    assert first.blocks[:4] == second.blocks[:4]


async def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    engine = an_engine()
    submit(engine, 16)
    run(engine)
    again = submit(engine, 16)
    assert run(engine)[0] == 4
    assert again.cached_tokens == 12


async def test_a_request_waits_while_all_blocks_are_in_use() -> None:
    engine = an_engine(num_gpu_blocks=8)
    submit(engine, 24, "a", max_tokens=3)
    step(engine)
    late = submit(engine, 12, "b", max_tokens=1)
    step(engine)
    assert (late.produced, len(engine.waiting)) == (0, 1)
    run(engine)
    assert late.produced == 1
    assert engine.cache.num_held == 0


async def test_no_more_than_max_num_seqs_run_at_once_in_order_of_arrival() -> None:
    engine = an_engine(max_num_seqs=2)
    sequences = [submit(engine, 4, name) for name in "abc"]
    step(engine)
    assert [sequence.produced for sequence in sequences] == [1, 1, 0]


async def test_the_youngest_is_preempted_when_running_requests_outgrow_the_cache() -> None:
    engine = an_engine(num_gpu_blocks=8)
    old, young = submit(engine, 12, "a", max_tokens=12), submit(engine, 12, "b", max_tokens=12)
    step(engine)
    step(engine)  # each has begun its fourth block, so all blocks are in use
    late = submit(engine, 4, "c", max_tokens=1)
    while not engine.stats.preemptions:
        step(engine)
    assert list(engine.waiting) == [young, late]
    run(engine)
    assert (old.produced, young.produced) == (12, 12)
    assert engine.cache.num_held == 0
    assert engine.stats.requests["length"] == 3


async def test_an_abort_frees_everything_at_once_even_in_the_middle_of_a_step() -> None:
    engine = an_engine()
    running, waiting = submit(engine, 40, "a"), submit(engine, 40, "b")
    batch, _ = engine.schedule()
    engine.abort(running)
    engine.abort(waiting)
    assert engine.cache.num_held == 0
    engine.finish_step(batch)
    assert (running.produced, engine.stats.requests["abort"]) == (0, 2)
    assert run(engine) == []


async def test_a_full_report_comes_again_with_each_attempt_to_admit_a_request() -> None:
    published: list[Batch] = []
    engine = an_engine(published, num_gpu_blocks=16)
    submit(engine, 18, "a", max_tokens=1)
    run(engine)
    published.clear()
    submit(engine, 32, "b", max_tokens=3)
    waiting = submit(engine, 50, "a", max_tokens=1, full_report=True)
    steps = len(run(engine))
    reports = [event for batch in published for event in batch.events if isinstance(event, Stored)]
    attempts = [event for event in reports if event.parent is None and event.hashes == waiting.hashes[:4]]
    assert len(attempts) == 3 < steps, "none beside the prefill that fills a step, two in vain, one that succeeds"


async def test_loading_from_the_cpu_tier_takes_a_tenth_of_the_time_of_prefill_and_comes_before_it() -> None:
    engine = an_engine(num_gpu_blocks=8, cpu_blocks=64, prefill_tokens_per_s=100.0, decode_s_per_token=0.0)
    submit(engine, 18, "a", max_tokens=1)
    run(engine)
    submit(engine, 31, "b", max_tokens=1)
    run(engine)
    again = submit(engine, 18, "a", max_tokens=1)
    before_s = asyncio.get_running_loop().time()
    _, prefill_tokens = engine.schedule()
    assert (prefill_tokens, again.computed) == (2, 16)
    assert again.scheduled_s >= before_s + 0.016
    assert engine._step_s(prefill_tokens) == pytest.approx(0.02 + 0.016)
