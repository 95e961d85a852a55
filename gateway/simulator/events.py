"""vLLM's KV events, recorded while an engine steps and handed over once per step.

Field names, their order, and which fields are left out at their default are those of vllm/distributed/kv_events.py.
They determine the bytes, as events are msgpack maps with keys in this order. Before 0.30, they name no sessions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.simulator.prompt import TOKEN_BYTES, token_ids
from gateway.simulator.sequence import TokenSequence
from gateway.simulator.settings import SimSettings

SESSION_ID_SINCE = (0, 30)

_GPU, _CPU = "GPU", "CPU"
_WINDOWS = ("sliding_window", "sliding_window_mla")
_WINDOW_TOKENS = 128


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared

_pack = msgspec.msgpack.Encoder().encode


def payload(events: Sequence[Event], rank: int) -> bytes:
    """The payload of one batch: `[ts, [event, …], data_parallel_rank]`."""
    return _pack((time.time(), events, rank))


class EventLog:
    """The changes of one engine's caches in the current step. Records nothing without `publish`."""

    def __init__(self, settings: SimSettings, publish: Callable[[list[Event]], None] | None) -> None:
        self._publish = publish
        self._events: list[Event] = []
        self._block_size = settings.block_size
        self._has_sessions = settings.version >= SESSION_ID_SINCE
        self._lora_ids: dict[str, int] = {}
        self._kinds = settings.attention

    def stored(self, sequence: TokenSequence, first: int, last: int) -> None:
        """Blocks `first` to `last` (exclusive) of a sequence are now cached on the GPU."""
        if last > first:
            for group, kind in enumerate(self._kinds):
                event = self._described(sequence, first, last, _GPU)
                event.extra_keys = sequence.hasher.extra_keys(first, last)
                event.group_idx, event.kv_cache_spec_kind = group, kind
                event.kv_cache_spec_sliding_window = _WINDOW_TOKENS if kind in _WINDOWS else None
                event.session_id = sequence.event_tag.session_id if self._has_sessions else None
                self._events.append(event)

    def reused(self, sequence: TokenSequence, num_blocks: int) -> None:
        """The scheduler found cached blocks of a waiting sequence. Published only for requests for full reports."""
        if sequence.event_tag.full_report:
            self.stored(sequence, 0, num_blocks)

    def evicted(self, hashes: Sequence[int]) -> None:
        """One event for each block that the GPU cache evicted, in this order."""
        groups = range(len(self._kinds))
        self._events += [BlockRemoved([each], _GPU, group) for each in hashes for group in groups]

    def offloaded(self, sequence: TokenSequence, block: int) -> None:
        """A block of a sequence has arrived in the CPU tier. Such events have neither extra keys nor a session."""
        self._events.append(self._described(sequence, block, block + 1, _CPU))

    def dropped(self, hashes: list[int]) -> None:
        """One event for all blocks that the CPU tier evicted at once."""
        self._events.append(BlockRemoved(hashes, _CPU, 0))

    def cleared(self) -> None:
        """The GPU cache was reset."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """The step is over: publish its events, if there are any."""
        if self._events and self._publish is not None:
            self._publish(self._events)
        self._events = []

    def _described(self, sequence: TokenSequence, first: int, last: int, medium: str) -> BlockStored:
        hashes, width = sequence.hashes, self._block_size * TOKEN_BYTES
        lora = sequence.prompt.lora
        return BlockStored(
            hashes[first:last],
            hashes[first - 1] if first else None,
            token_ids(sequence.tokens[first * width : last * width]),
            self._block_size,
            self._lora_ids.setdefault(lora, len(self._lora_ids) + 1) if lora else None,
            medium,
            lora,
            group_idx=0,
            kv_cache_spec_kind=self._kinds[0],
        )
