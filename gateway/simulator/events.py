"""vLLM's KV events, recorded while an engine steps and handed over once per step.

Field names, their order, and which fields are left out at their default are those of vllm/distributed/kv_events.py.
They determine the bytes, as events are msgpack maps with keys in this order. Before 0.30, they name no sessions.

Two ZeroMQ sockets of each engine give them away, with vLLM's framing. A PUB sends live batches as `(topic, seq,
payload)`. `seq` has 8 bytes, big-endian, and starts from 0 in each process. A ROUTER answers `(b"", start_seq)` with
`(b"", topic, seq, payload)` for each later batch that the ring still has, then `(b"", b"", -1, b"")`. As in vLLM, both
silently drop messages for a peer that is too slow.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gateway.simulator.faults import OF_EVENTS, Faults
from gateway.simulator.prompt import TOKEN_BYTES, token_ids
from gateway.simulator.sequence import TokenSequence
from gateway.simulator.settings import SimSettings

SESSION_ID_SINCE = (0, 30)

TOPIC = b"kv"
_SEQ_BYTES = 8
_END = (-1).to_bytes(_SEQ_BYTES, "big", signed=True)
_HWM = 100_000
_REPLAY_BURST = 32
"""Batches of a replay that are sent before the engine may run."""
_REPLAY_REQUEST_FRAMES = 3

_Frames = tuple[bytes, bytes, bytes]
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


class EventPublisher:
    """The publisher of one data-parallel rank. A fixed port is the configured one plus the rank."""

    def __init__(self, settings: SimSettings, rank: int, faults: Faults) -> None:
        self._settings = settings
        self.rank = rank
        self._faults = faults
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=settings.replay_steps)
        self._next_seq = 0
        self._delayed: _Frames | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._live: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None

    def bind(self) -> None:
        """Bind the ports, on a running loop. Raises OSError if one is taken; `close` is needed then, too."""
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._live.set_hwm(_HWM)
        self._bind(self._live, self._settings.events_port)
        if self._settings.replay_steps:
            self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
            self._bind(self._replay, self._settings.replay_port)

    def close(self) -> None:
        """Close the ports. Unsent batches are lost."""
        for each in (self._live, self._replay):
            if each is not None:
                each.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._live = self._replay = self._context = None

    def config(self) -> dict[str, Any]:
        """This rank's entry in the answer of GET /kv_event_sources, with its bound endpoints."""
        assert self._live is not None
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _endpoint(self._live),
            "replay_endpoint": _endpoint(self._replay) if self._replay is not None else None,
            "buffer_steps": self._settings.replay_steps,
            "hwm": _HWM,
            "max_queue_size": _HWM,
            "topic": TOPIC.decode(),
        }

    def publish(self, events: list[Event]) -> None:
        """Number a batch, keep it for replays and send it, unless a fault changes that."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        frames = (TOPIC, _number(seq), payload(events, self.rank))
        delayed, self._delayed = self._delayed, None
        # No fault applies to the successor of a delayed batch, so that the two do change places.
        fault = self._faults.take(*OF_EVENTS) if delayed is None else None
        mode = None if fault is None else fault.mode
        if mode != "lose_events":
            self._ring.append((seq, frames[-1]))
        if mode == "delay_events":
            self._delayed = frames
        elif mode not in ("drop_events", "lose_events"):
            self._send(frames)
        if mode == "duplicate_events":
            self._send(frames)
        if delayed is not None:
            self._send(delayed)

    async def serve_replays(self) -> None:
        """Answer replay requests one after another, for ever. Returns at once if there is no ring."""
        while (replay := self._replay) is not None:
            frames = await replay.recv_multipart()
            if len(frames) != _REPLAY_REQUEST_FRAMES:
                continue
            client, _, start = frames
            for seq, kept in list(self._ring):
                if seq >= int.from_bytes(start, "big"):
                    await replay.send_multipart((client, b"", TOPIC, _number(seq), kept))
                if seq % _REPLAY_BURST == 0:
                    await asyncio.sleep(0)
            await replay.send_multipart((client, b"", b"", _END, b""))

    def _send(self, frames: _Frames) -> None:
        if self._live is not None:
            self._live.send_multipart(frames, zmq.NOBLOCK)

    def _bind(self, bound: zmq.Socket[Any], first_port: int) -> None:
        host = _numeric(self._settings.host)
        if ":" in host:
            bound.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        endpoint = f"tcp://{host}:{first_port + self.rank if first_port else 0}"
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"KV events on {endpoint}: {os.strerror(error.errno or 0)}") from error


def _number(seq: int) -> bytes:
    return seq.to_bytes(_SEQ_BYTES, "big")


def _endpoint(bound: zmq.Socket[Any]) -> str:
    """The endpoint of a socket. Wildcards are written as in vLLM's configuration."""
    address, _, port = bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")
    host = address.removeprefix("tcp://").strip("[]")
    return f"tcp://*:{port}" if ipaddress.ip_address(host).is_unspecified else f"{address}:{port}"


def _numeric(host: str) -> str:
    """The first address of a host. ZeroMQ cannot bind names."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
