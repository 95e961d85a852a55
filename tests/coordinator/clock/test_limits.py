"""What tenants owe is the same when Redis' clock goes back."""

from __future__ import annotations

import pytest

from coordinator.errors import OverLimit
from coordinator.placement import PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from tests.account_limits import limits_of
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.queueing import asking


async def test_a_bucket_is_as_full_after_a_step_back_as_before(pool: Pool, clock: Clock) -> None:
    def asked(name: str) -> PlaceRequest:
        asked = asking(name, PolicyKnobs(), tenant="t")
        asked.limits = limits_of(tokens_per_min=100, output_tokens=3000)
        return asked

    waits_s = []
    await clock.step(HOUR_MS)
    await pool.place(asked("big"))
    for step_ms in (0, -HOUR_MS, 1000):
        await clock.step(step_ms)
        with pytest.raises(OverLimit) as refused:
            await pool.place(asked("next"))
        waits_s.append(refused.value.wait_s)
    assert waits_s[0] > 1700
    assert waits_s[1] == pytest.approx(waits_s[0], abs=2)
    assert waits_s[2] < waits_s[1]
