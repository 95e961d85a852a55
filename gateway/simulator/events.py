"""vLLM's KV events, recorded while an engine steps and handed over once per step.

The field names, their order and which of them are left out at their default are those of
vllm/distributed/kv_events.py, because they decide the bytes: events are msgpack maps whose keys stand in the order
of the fields. What each version of vLLM has is decided here too.

Events are most of what a simulated replica does beside hashing, so they are packed when they happen, and what there
is much of (token ids, evictions) is put together from bytes rather than from Python objects.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.simulator.prompt import TOKEN_BYTES
from gateway.simulator.sequence import TokenSequence
from gateway.simulator.settings import SimSettings

MAPS_SINCE = (0, 24)
"""Before it, an event is an array: its type, then its fields."""
REPORT_MODE_SINCE = (0, 26)
SESSION_ID_SINCE = (0, 30)

_GPU, _CPU = "GPU", "CPU"
_GROUP = 0
_SPEC_KIND = "full_attention"
_HASH_BYTES = 8
_ANY_HASH = (1 << 64) - 1
_MAX_FIXARRAY = 15
_MAX_ARRAY16 = 0xFFFF


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


_Event = BlockStored | BlockRemoved | AllBlocksCleared
_ARRAY_FIELDS = 11
"""Arrays had nothing behind `kv_cache_spec_sliding_window`."""


@dataclass(frozen=True, slots=True)
class Events:
    """So many packed events."""

    count: int
    packed: bytes


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: int


_pack = msgspec.msgpack.Encoder().encode


def payload(events: Events, rank: int) -> bytes:
    """Of one batch: `[ts, [event, …], data_parallel_rank]`."""
    return _pack(_Batch(time.time(), msgspec.Raw(_array_head(events.count) + events.packed), rank))


class EventLog:
    """What one engine did to its caches in the step at hand; records nothing without a `publish` to give it to."""

    def __init__(self, settings: SimSettings, publish: Callable[[Events], None] | None) -> None:
        version = settings.version
        self._publish = publish
        self._packed: list[bytes] = []
        self._count = 0
        self._block_size = settings.block_size
        self._has_sessions = version >= SESSION_ID_SINCE
        self._has_reports = version >= REPORT_MODE_SINCE
        self._lora_ids: dict[str, int] = {}
        self._pack_event: Callable[[_Event], bytes] = _pack if version >= MAPS_SINCE else _pack_array
        eviction = self._pack_event(BlockRemoved([_ANY_HASH], _GPU, _GROUP))
        self._eviction = eviction.split(_ANY_HASH.to_bytes(_HASH_BYTES, "big"))
        """What is before and behind the hash in the event of an eviction."""

    def stored(self, sequence: TokenSequence, first: int, last: int) -> None:
        """Blocks `first` to `last` (exclusive) of a sequence count as cached on the GPU from now on."""
        if self._publish is not None and last > first:
            event = self._described(sequence, first, last, _GPU)
            event.extra_keys = sequence.extra_keys(first, last)
            if self._has_sessions:
                event.session_id = sequence.event_tag.session_id
            self._add(event)

    def reused(self, sequence: TokenSequence, num_blocks: int) -> None:
        """The scheduler found so many blocks of a waiting sequence: told only to who asked for full reports."""
        if self._has_reports and sequence.event_tag.full_report:
            self.stored(sequence, 0, num_blocks)

    def evicted(self, hashes: Sequence[int]) -> None:
        """One event for each block that the GPU cache gave up, in that order."""
        if self._publish is not None and hashes:
            before, behind = self._eviction
            inner = (behind + before).join([block_hash.to_bytes(_HASH_BYTES, "big") for block_hash in hashes])
            self._packed += (before, inner, behind)
            self._count += len(hashes)

    def offloaded(self, sequence: TokenSequence, block: int) -> None:
        """A block of a sequence has arrived in the CPU tier. Such events have neither extra keys nor a session."""
        if self._publish is not None:
            self._add(self._described(sequence, block, block + 1, _CPU))

    def dropped(self, hashes: Sequence[int]) -> None:
        """One event for all the blocks that the CPU tier gave up at once."""
        if self._publish is not None and hashes:
            self._add(BlockRemoved(list(hashes), _CPU, _GROUP))

    def cleared(self) -> None:
        """The GPU cache was reset."""
        if self._publish is not None:
            self._add(AllBlocksCleared())

    def flush(self) -> None:
        """The step is over: publish what it changed, if anything."""
        if self._count and self._publish is not None:
            events = Events(self._count, b"".join(self._packed))
            self._packed.clear()
            self._count = 0
            self._publish(events)

    def _add(self, event: _Event) -> None:
        self._packed.append(self._pack_event(event))
        self._count += 1

    def _described(self, sequence: TokenSequence, first: int, last: int, medium: str) -> BlockStored:
        hashes, width = sequence.hashes, self._block_size * TOKEN_BYTES
        lora = sequence.prompt.lora
        return BlockStored(
            hashes[first:last],
            hashes[first - 1] if first else None,
            packed_token_ids(sequence.tokens[first * width : last * width]),
            self._block_size,
            self._lora_ids.setdefault(lora, len(self._lora_ids) + 1) if lora else None,
            medium,
            lora,
            group_idx=_GROUP,
            kv_cache_spec_kind=_SPEC_KIND,
        )


def _pack_array(event: _Event) -> bytes:
    return _pack([type(event).__name__, *msgspec.structs.astuple(event)[:_ARRAY_FIELDS]])


def packed_token_ids(tokens: bytes | bytearray) -> msgspec.Raw:
    """The ids of `tokens` as a msgpack array, each as a 32-bit integer whatever its size."""
    count = len(tokens) // TOKEN_BYTES
    ids = array("I", bytes(tokens))
    if sys.byteorder == "little":
        ids.byteswap()
    swapped = ids.tobytes()
    packed = bytearray(b"\xce\0\0\0\0" * count)
    for at in range(TOKEN_BYTES):
        packed[at + 1 :: TOKEN_BYTES + 1] = swapped[at::TOKEN_BYTES]
    return msgspec.Raw(_array_head(count) + packed)


def _array_head(count: int) -> bytes:
    """What begins a msgpack array of so many items."""
    if count <= _MAX_FIXARRAY:
        return bytes([0x90 | count])
    if count <= _MAX_ARRAY16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")
