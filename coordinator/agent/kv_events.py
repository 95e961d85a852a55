"""Decodes vLLM's KV events, as they arrive over ZMQ. Pure; the shapes are those of vllm/distributed/kv_events.py.

A payload is msgpack `[ts, [event, …], data_parallel_rank]`. An event is a map with a "type". Fields with their
default value may be missing, and fields of later versions are ignored. A hash is an unsigned 64-bit integer, or bytes,
of which the last eight count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_MASK = (1 << 64) - 1
_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""The kinds of cache groups whose blocks hold whole prefixes. Engines that name no kind have one of these. `unknown` is
none of them: vLLM calls a group so if its layers have several kinds, which may all be windows."""


class EventError(ValueError):
    """The payload is not a batch of KV events."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that are cached from now on, in the order of the prompt.

    `tokens` has `block_size` ids for each hash, or none (events of offloaded blocks may omit them). `extra` has, for
    each hash, its other inputs: LoRA name, (media identifier, offset of its start from the block's start), salt.
    """

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    medium: str
    extra: list[Any] | None
    group: int | None
    is_prefix: bool
    """Whether the group holds every token of a prefix (full attention). Other groups tell nothing of prefixes."""
    session: str | None
    lora: str | None = None
    """The name of the LoRA adapter that computed the blocks."""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks that were evicted from a medium. Engines send an event for each."""

    hashes: list[int]
    medium: str
    group: int | None


class Cleared(msgspec.Struct, frozen=True):
    """The prefix cache on a medium was reset. vLLM names no medium and means the GPU's: what it has offloaded stays."""

    medium: str = "gpu"


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The changes of one engine step to the cache. `ts` is the engine host's clock, in seconds."""

    ts: float
    events: list[Event]


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    medium: str | None = None


_Map = _Stored | _Removed | _Cleared


class _Maps(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Map]


class _Raws(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_maps = msgspec.msgpack.Decoder(_Maps)
_raws = msgspec.msgpack.Decoder(_Raws)
_map = msgspec.msgpack.Decoder(_Map)
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def decode(payload: bytes) -> Batch:
    """Decode one payload. Events of an unknown type are left out, and arrays, as vLLM before 0.24 sends them. Raises
    EventError."""
    try:
        try:
            batch = _maps.decode(payload)
        except msgspec.ValidationError:  # some events are of an unknown type
            raws = _raws.decode(payload)
            found = [event for raw in raws.events if (event := _one(raw)) is not None]
            return Batch(raws.ts, [_event(each) for each in found])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"not a batch of KV events: {error}") from None
    return Batch(batch.ts, [_event(each) for each in batch.events])


def _one(raw: msgspec.Raw) -> _Map | None:
    """Decode one event; None if its type is not known."""
    loose = msgspec.msgpack.decode(raw)
    if isinstance(loose, dict):
        return _map.decode(raw) if loose.get("type") in _KNOWN else None
    if isinstance(loose, list):
        return None
    raise msgspec.ValidationError("an event is a map that names its type")


def _event(found: _Map) -> Event:
    if isinstance(found, _Removed):
        return Removed(_numbers(found.block_hashes), _medium(found.medium), found.group_idx)
    if isinstance(found, _Stored):
        return Stored(
            hashes=_numbers(found.block_hashes),
            parent=None if found.parent_block_hash is None else _numbers([found.parent_block_hash])[0],
            tokens=found.token_ids,
            block_size=found.block_size,
            medium=_medium(found.medium),
            extra=found.extra_keys,
            group=found.group_idx,
            is_prefix=found.kv_cache_spec_kind in _ATTENTION,
            session=found.session_id,
            lora=found.lora_name,
        )
    return Cleared(_medium(found.medium))


def _numbers(hashes: list[int | bytes]) -> list[int]:
    """As unsigned integers: Python's own hash, which engines may use, has a sign."""
    return [(each if isinstance(each, int) else int.from_bytes(each, "big")) & _MASK for each in hashes]


def _medium(name: str | None) -> str:
    return (name or "GPU").lower()
