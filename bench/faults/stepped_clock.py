"""Runs `kvgate` with scripts whose clock is off by the value of the key OFFSET_KEY.

This simulates a failover to a host whose clock is ahead or behind. (Redis' own clock is the machine's clock, which a
benchmark must not change. Expiry times of keys do not step with it.)

    python -m bench.faults.stepped_clock gateway --config FILE
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from coordinator import scripts
from coordinator.policy_knobs import PolicyKnobs

OFFSET_KEY = "kvgate:test:clock_offset_ms"
_TIME = (files("coordinator") / "lua" / "lib" / "time.lua").read_text()
_STEPPED = f"""
local now_ms
do
  local unstepped_ms = (function()
{_TIME}
    return now_ms
  end)()
  now_ms = function()
    return unstepped_ms() + tonumber(redis.call('GET', '{OFFSET_KEY}') or 0)
  end
end
"""
_source = scripts.source


@cache
def stepped(name: str, knobs: PolicyKnobs | None = None) -> str:
    """A script's text with this clock."""
    return _source(name, knobs).replace(_TIME, _STEPPED)


if __name__ == "__main__":
    from gateway.ops.cli import main

    scripts.source = stepped
    main()
