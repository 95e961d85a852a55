"""vLLM's KV events, recorded while an engine steps and handed over once per step.

Field names, their order, and which fields are left out at their default are those of vllm/distributed/kv_events.py.
They determine the bytes, as events are msgpack maps with keys in this order. Before 0.30, they name no sessions.

Next to hashing, events take most of a simulated replica's CPU time. So they are packed when they happen, and their
large parts (token ids, evictions) are built from bytes instead of Python objects.
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

SESSION_ID_SINCE = (0, 30)

_GPU, _CPU = "GPU", "CPU"
_WINDOWS = ("sliding_window", "sliding_window_mla")
_WINDOW_TOKENS = 128
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


@dataclass(frozen=True, slots=True)
class Events:
    """Packed events, and their number."""

    count: int
    packed: bytes


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: int


_pack = msgspec.msgpack.Encoder().encode


def payload(events: Events, rank: int) -> bytes:
    """The payload of one batch: `[ts, [event, …], data_parallel_rank]`."""
    return _pack(_Batch(time.time(), msgspec.Raw(_array_head(events.count) + events.packed), rank))


class EventLog:
    """The changes of one engine's caches in the current step. Records nothing without `publish`."""

    def __init__(self, settings: SimSettings, publish: Callable[[Events], None] | None) -> None:
        self._publish = publish
        self._packed: list[bytes] = []
        self._count = 0
        self._block_size = settings.block_size
        self._has_sessions = settings.version >= SESSION_ID_SINCE
        self._lora_ids: dict[str, int] = {}
        self._kinds = settings.attention
        packed = b"".join(_pack(BlockRemoved([_ANY_HASH], _GPU, group)) for group in range(len(self._kinds)))
        self._eviction = packed.split(_ANY_HASH.to_bytes(_HASH_BYTES, "big"))
        """The bytes around the hash in the events of an eviction: one for each group."""

    def stored(self, sequence: TokenSequence, first: int, last: int) -> None:
        """Blocks `first` to `last` (exclusive) of a sequence are now cached on the GPU."""
        if self._publish is not None and last > first:
            event = self._described(sequence, first, last, _GPU)
            event.extra_keys = sequence.extra_keys(first, last)
            if self._has_sessions:
                event.session_id = sequence.event_tag.session_id
            for group, kind in enumerate(self._kinds):
                event.group_idx, event.kv_cache_spec_kind = group, kind
                event.kv_cache_spec_sliding_window = _WINDOW_TOKENS if kind in _WINDOWS else None
                self._add(event)

    def reused(self, sequence: TokenSequence, num_blocks: int) -> None:
        """The scheduler found cached blocks of a waiting sequence. Published only for requests for full reports."""
        if sequence.event_tag.full_report:
            self.stored(sequence, 0, num_blocks)

    def evicted(self, hashes: Sequence[int]) -> None:
        """One event for each block that the GPU cache evicted, in this order."""
        if self._publish is not None and hashes:
            self._packed += [block_hash.to_bytes(_HASH_BYTES, "big").join(self._eviction) for block_hash in hashes]
            self._count += len(hashes) * len(self._kinds)

    def offloaded(self, sequence: TokenSequence, block: int) -> None:
        """A block of a sequence has arrived in the CPU tier. Such events have neither extra keys nor a session."""
        if self._publish is not None:
            self._add(self._described(sequence, block, block + 1, _CPU))

    def dropped(self, hashes: Sequence[int]) -> None:
        """One event for all blocks that the CPU tier evicted at once."""
        if self._publish is not None and hashes:
            self._add(BlockRemoved(list(hashes), _CPU, 0))

    def cleared(self) -> None:
        """The GPU cache was reset."""
        if self._publish is not None:
            self._add(AllBlocksCleared())

    def flush(self) -> None:
        """The step is over: publish its events, if there are any."""
        if self._count and self._publish is not None:
            events = Events(self._count, b"".join(self._packed))
            self._packed.clear()
            self._count = 0
            self._publish(events)

    def _add(self, event: _Event) -> None:
        self._packed.append(_pack(event))
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
            group_idx=0,
            kv_cache_spec_kind=self._kinds[0],
        )


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
    """The first bytes of a msgpack array of `count` items."""
    if count <= _MAX_FIXARRAY:
        return bytes([0x90 | count])
    if count <= _MAX_ARRAY16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")
