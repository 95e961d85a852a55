"""Cost expressions in virtual time: runs are fast and repeatable, and use the same mixes as the benchmark."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.routing.mixes import Mix, Workload
from bench.routing.whatif import Variant, VirtualTimeLoop, Weights, run, variant
from bench.workloads import about, text, user, words

SMALL = Mix("small", "questions about six documents", 2, 8_000, 4, lambda seed: _documents(seed))


def _documents(seed: int) -> Workload:
    rng = random.Random(seed)
    contexts = [[words(text(rng, 8000))] for _ in range(6)]
    sessions = about(rng, contexts, [rng.randrange(6) for _ in range(60)], user(words("system")))
    return Workload([], sessions, list(range(60)))


def test_an_hour_takes_no_time() -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() == pytest.approx(3600)
    finally:
        loop.close()


def test_a_seed_gives_the_same_figures_every_time_and_another_seed_others() -> None:
    first = run(SMALL, Variant(), 1)
    assert sum(first.requests) == len(first.ttft_s) == 60
    assert first.figures == run(SMALL, Variant(), 1).figures != run(SMALL, Variant(), 2).figures


def test_where_computing_costs_nothing_less_is_found_in_the_caches() -> None:
    blind = run(SMALL, variant("charged=0,displaced=0"), 1).figures["cached %"]
    assert run(SMALL, Variant(), 1).figures["cached %"] > blind + 10


def test_a_variant_names_its_weights() -> None:
    assert variant("charged=2,copy=8") == Variant(Weights(charged=2, copy=8))
    with pytest.raises(ValueError, match="nonsense"):
        variant("nonsense=1")
