"""The time that loading a token saves, from an engine's counters."""

from __future__ import annotations

import pytest

from coordinator.agent.rates import Rates

TOKEN_BYTES = 1000.0


def rates(*counters: dict[str, float]) -> Rates:
    found = Rates()
    for second, each in enumerate(counters):
        found.observe(each, 6.0 * second)
    return found


def engine(prefills: float = 0, tokens: float = 0, seconds: float = 0, **others: float) -> dict[str, float]:
    return {"prefills": prefills, "prefill_computed_tokens": tokens, "prefill_s": seconds, **others}


COMPUTED = (engine(), engine(2, 4000, 4))
"""1 000 computed tokens per second."""


def test_what_loading_saves_is_what_of_the_prefills_time_it_does_not_take() -> None:
    found = rates(*COMPUTED, engine(2, 4000, 4, l2_load_bytes_per_s=4e6))
    assert found.store_credit(TOKEN_BYTES) == pytest.approx(0.75)
    assert found.store_credit(TOKEN_BYTES * 2) == pytest.approx(0.5)


def test_offloaded_blocks_are_loaded_at_the_rate_that_vllm_tells() -> None:
    found = rates(engine(cpu_load_s=0, cpu_loaded_tokens=0), engine(2, 4000, 4, cpu_load_s=0.1, cpu_loaded_tokens=1000))
    assert found.cpu_credit(None) == pytest.approx(0.9)


def test_chunks_in_cpu_memory_are_loaded_at_the_rate_that_lmcache_tells() -> None:
    found = rates(*COMPUTED, engine(2, 4000, 4, l1_load_bytes_per_s=1e7))
    assert found.cpu_credit(TOKEN_BYTES) == pytest.approx(0.9)


def test_an_engine_that_slows_down_is_believed() -> None:
    looks = [engine(n, 4000.0 * n, 4.0 * n) for n in range(100)]
    slower = [engine(100 + n, 400_000 + 4000.0 * n, 400 + 40.0 * n) for n in range(40)]
    found = rates(*looks, *slower, {**slower[-1], "l2_load_bytes_per_s": 1e6})
    assert found.store_credit(TOKEN_BYTES) == pytest.approx(0.9, abs=0.02)


def test_an_engine_that_fetches_prompts_from_others_tells_nothing_of_its_speed() -> None:
    """vLLM counts a transfer when it happens, and the prompt as one that was computed at the end of its request."""
    fetched = [engine(transfers=1), *(engine(10 * n, 6000 * n, 0.06 * n, transfers=10) for n in range(1, 9))]
    assert rates(*COMPUTED[:1], *fetched).prefill_tokens_per_s() is None


def test_an_engine_that_begins_to_count_anew_is_no_negative_rate() -> None:
    found = rates(*COMPUTED, engine(1, 300, 0.3), engine(2, 4300, 4.3, l2_load_bytes_per_s=4e6))
    assert found.store_credit(TOKEN_BYTES) == pytest.approx(0.75)


def test_an_engine_is_as_fast_as_one_prefill_alone_or_as_many_together_in_a_window() -> None:
    assert rates(engine()).prefill_tokens_per_s() is None
    assert rates(*COMPUTED).prefill_tokens_per_s() is None, "the first prefills of a fresh engine tell little"
    assert rates(engine(), engine(8, 16_000, 16)).prefill_tokens_per_s() == 1000.0
    seldom_alone = rates(*COMPUTED, engine(10, 20_000, 132), engine(18, 36_000, 260))
    assert seldom_alone.prefill_tokens_per_s() > 2 * 125, "as fast as its prefill alone, less with time"
    shared = rates(engine(), engine(8, 12_000, 48), engine(16, 24_000, 96), engine(16, 24_000, 96))
    assert shared.prefill_tokens_per_s() == 2000.0, "of 24 000 in 12 s, though each prefill took 6 s for 1 500"
