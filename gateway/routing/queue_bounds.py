"""How many requests may be queued in a gateway. `refusal_of` in lua/lib/turns.lua is the store's same rule. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def why_full(queued: Iterable[tuple[int, str]], band: int, tenant: str, *, most: int, most_of_tenant: int) -> str:
    """`full` or `full_tenant` if one more request of this band and tenant may not be queued; else empty. `queued`: the
    bands and tenants of the others. Those of bands behind its own take no place away from it."""
    queued = list(queued)
    if sum(other == tenant for _, other in queued) >= most_of_tenant:  # what the tenant can mend comes first
        return "full_tenant"
    return "full" if sum(other <= band for other, _ in queued) >= most else ""
