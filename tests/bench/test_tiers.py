"""A small `python -m bench.tiers`."""

from __future__ import annotations

import pytest

from bench.tiers import Published, Scenario, measured, sessions

_NONE = Published(0, 0, 0)
# The prefixes of all groups take 1.3 times the blocks of all GPUs.
SMALL = Scenario(
    "small", 3000, _NONE, _NONE, groups=9, clients=9, answer_tokens=32, replicas=3, gpu_blocks=450, cpu_blocks=4000
)


@pytest.mark.slow
def test_the_cpu_tier_gives_back_what_the_gpus_are_too_small_for() -> None:
    without, with_tier = (measured(SMALL, has_tier, gateways=2, speed=10, seed=3) for has_tier in (False, True))
    for row in (without, with_tier):
        assert (row.requests, row.failed) == (len(sessions(SMALL, 3)), 0)
    assert without.from_cpu == pytest.approx(0, abs=0.001)
    assert with_tier.from_cpu > 0.1
    # Nine of ten prompts find their prefix, but for those that come while it is still computed.
    assert without.from_gpu + 0.1 < with_tier.from_gpu + with_tier.from_cpu > 0.7
