"""How a gateway wants placements to be chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyKnobs:
    """How to choose: the policy's name, and when requests wait. The defaults are a gateway's: the script with these is
    loaded when it connects."""

    name: str = "prefix_kv_aware"
    max_active_requests: int = 0
    max_wait_s: float = 10.0
    prefill_tokens_per_s: float = 8000.0
    max_waiting: int = 1000
    max_waiting_per_tenant: int = 500
    tells_costs: int = 0
