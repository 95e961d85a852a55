"""What an operator should do something about, before it is trouble or while it is. Each says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from coordinator.redis.info import evicts_all, refuses_when_full
from coordinator.watch.figures import Estimate, Info

Condition = Literal[
    "maxmemory_unset",
    "policy_unfit",
    "redis_older_than_7",
    "nothing_to_evict",
    "writes_refused",
    "chunks_without_ttl",
    "chunks_too_large",
    "coordination_large",
    "coordination_evicted",
    "notifications_off",
    "not_permitted",
]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)

MIB = 2**20
LARGE_CHUNK_BYTES = int(5.5 * MIB)
"""As MEMORY USAGE has it: Redis' allocator gives a value of 4 MiB the next larger size, 5 MiB."""
_FULL_SHARE = 0.9
_LITTLE_SHARE = 0.1
_LARGE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Lately:
    """What was met in the last minute."""

    has_chunks: bool
    """At any time, since this one watches."""
    refused_writes: int
    ttls_given: int
    largest_chunk_bytes: int
    evicted_coordination: str
    """One of KVGate's keys that was evicted; empty: none."""
    hears: bool
    denied: str
    """What Redis said when it refused the watcher a command; empty: nothing."""


def conditions(info: Info, estimate: Estimate, lately: Lately) -> dict[Condition, str]:
    """What holds now, in words."""
    return _of_settings(info, lately) | _of_memory(info, estimate, lately)


def _of_settings(info: Info, lately: Lately) -> dict[Condition, str]:
    found: dict[Condition, str] = {}
    if not info.maxmemory_bytes and lately.has_chunks:
        found["maxmemory_unset"] = "maxmemory is not set: chunks grow until the machine has no memory; set it"
    if problem := evicts_all(info.policy):
        found["policy_unfit"] = problem
    elif not info.policy.startswith("volatile-") and info.maxmemory_bytes and lately.has_chunks:
        found["policy_unfit"] = f"maxmemory-policy {info.policy} evicts no chunk to make room: set volatile-lru"
    if problem := refuses_when_full(info.version):
        found["redis_older_than_7"] = problem
    if lately.has_chunks and not lately.hears:
        found["notifications_off"] = (
            "Redis does not tell of writes: chunks are found by chance alone; set notify-keyspace-events E$e"
        )
    if lately.denied:
        found["not_permitted"] = f"{lately.denied}; what the watch needs stands in docs/security.md"
    return found


def _of_memory(info: Info, estimate: Estimate, lately: Lately) -> dict[Condition, str]:
    found: dict[Condition, str] = {}
    limit = info.maxmemory_bytes
    if info.used_share > _FULL_SHARE and estimate.evictable_bytes < _LITTLE_SHARE * limit:
        found["nothing_to_evict"] = (
            f"{info.used_share:.0%} of maxmemory is used, and only {estimate.evictable_bytes / MIB:.0f} MiB of it have "
            "a TTL: writes of chunks will be refused; raise maxmemory, or see to it that chunks have a TTL"
        )
    if lately.refused_writes:
        found["writes_refused"] = f"Redis refused {lately.refused_writes} commands lately: its memory is full"
    if lately.ttls_given:
        found["chunks_without_ttl"] = (
            "LMCache writes chunks without a TTL, and they are given one here: use its valkey adapter with ttl_seconds "
            "(`kvgate replica-command`)"
        )
    if lately.largest_chunk_bytes > LARGE_CHUNK_BYTES:
        found["chunks_too_large"] = (
            f"chunks take up to {lately.largest_chunk_bytes / MIB:.1f} MiB, and a placement waits behind each that is "
            "read: lower LMCache's chunk size to 4 MiB"
        )
    coordination_bytes = estimate.bytes["coordination"]
    if limit and coordination_bytes > _LARGE_SHARE * limit:
        found["coordination_large"] = (
            f"KVGate's keys take {coordination_bytes / MIB:.0f} MiB, more than half of maxmemory, and are never "
            "evicted: raise it"
        )
    if lately.evicted_coordination:
        found["coordination_evicted"] = (
            f"{lately.evicted_coordination} was evicted: raise maxmemory, or set maxmemory-policy volatile-lru"
        )
    return found
