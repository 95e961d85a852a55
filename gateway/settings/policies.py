"""The routing policies: how a replica is chosen for a request.

The setting `policy.name`, the header x-kvgate-policy and the option --policy take their names from here.
coordinator/lua/place.lua carries the policies out.
"""

from __future__ import annotations

from typing import Final

from coordinator.policy_knobs import PolicyKnobs

POLICIES: Final = {
    "prefix_kv_aware": "the fewest tokens to wait for and to compute; what a KV cache holds is not computed again",
    "round_robin": "each replica in turn, in one sequence for all gateways",
    "random": "a random replica, whatever its load",
    "least_loaded": "the fewest active requests",
    "power_of_two": "of two random replicas, the one with fewer active requests",
    "consistent_hash": "always the same replica for the same first image or user message, by rendezvous hashing",
}
"""Each policy's name, and the replica that it chooses."""
DEFAULT_POLICY: Final = PolicyKnobs().name
