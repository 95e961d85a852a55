"""One engine's KV events over ZMQ: live from its PUB socket, missed ones replayed by its ROUTER socket, in one order.

vLLM publishes (topic, seq, payload). With snapshots on, the name of its process follows the number in the frame of
`seq`, and an idle engine publishes an empty batch each second. It replays the batches in its ring as (b"", topic, seq,
payload), and ends with seq -1. Older versions and SGLang replay without the topic. batch_sequence.py decides the order.
Nothing is buffered here: during a replay, live batches wait in their socket, which holds `hwm` of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from enum import Enum, auto

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from coordinator.agent.batch_sequence import BatchSequence, Item, Restarted
from coordinator.agent.kv_events import Batch, EventError, decode

_END_SEQ = -1
_SEQ_BYTES = 8
_EVENT_FRAMES = 3
_REPLY_FRAMES = (3, 4)
_KEEPALIVE_S = 10
"""TCP probes a connection that is quiet for this time: a host that vanished closes nothing."""


class Feed:
    """One engine's batches, in order, each exactly once. It also yields which batches are lost, and restarts.

    The endpoints are those of one rank, to connect to. Without a `replay_endpoint` every gap is lost;
    give none for an engine that keeps no ring.

    When nothing comes for `idle_s`, the engine is asked for a replay: that finds a dropped last batch, and a restarted
    engine. A replay that is silent for `replay_timeout_s` is given up; only batches after a gap wait for it. At most
    `hwm` live batches, and as many replayed ones, wait in memory for a slow reader.
    """

    def __init__(
        self,
        events_endpoint: str,
        replay_endpoint: str | None,
        *,
        hwm: int = 100_000,
        idle_s: float = 1.0,
        replay_timeout_s: float = 5.0,
    ) -> None:
        self._events_endpoint = events_endpoint
        self._replay_endpoint = replay_endpoint
        self._hwm = hwm
        self._idle_s = idle_s
        self._replay_timeout_s = replay_timeout_s
        self._sequence = BatchSequence()
        self._replay_deadline_s: float | None = None
        """Event loop time; None while no replay is under way."""
        self._is_replay_sound = True
        self.heard_s: float | None = None
        """When the last batch or answer to a replay came (monotonic time)."""

    async def items(self) -> AsyncGenerator[Item, None]:
        """Yields batches as they come, without end. Iterate once; close it (`aclosing`) to close the connections.

        Raises zmq.ZMQError for endpoints that no socket can connect to, such as misspelt ones. If the engine is away,
        it waits.
        """
        sockets = _Sockets(self._events_endpoint, self._hwm)
        try:
            while True:
                for item in await self._step(sockets):
                    yield item
        finally:
            sockets.close()

    async def _step(self, sockets: _Sockets) -> list[Item]:
        if self._sequence.asking:
            return await self._ask(sockets)
        deadline_s = self._replay_deadline_s
        patience_s = self._idle_s if deadline_s is None else max(0.0, deadline_s - _now_s())
        source = await sockets.wait(patience_s, live=not self._sequence.holding, replies=deadline_s is not None)
        if source is _Source.EVENTS:
            return await self._take_live(sockets)
        if source is _Source.REPLAY:
            return await self._take_reply(sockets)
        if deadline_s is not None:
            return self._end_replay(sockets, complete=False)
        return await self._ask(sockets)

    async def _ask(self, sockets: _Sockets) -> list[Item]:
        start_seq = self._sequence.ask()
        if self._replay_endpoint is None:
            return self._sequence.ended(complete=False)
        if self._replay_deadline_s is not None:
            sockets.drop_replay()
        await sockets.request_replay(self._replay_endpoint, start_seq)
        self._is_replay_sound = True
        self._replay_deadline_s = _now_s() + self._replay_timeout_s
        return []

    async def _take_live(self, sockets: _Sockets) -> list[Item]:
        frames, has_reconnected = await sockets.receive_live()
        self.heard_s = time.monotonic()
        numbered = _numbered(frames) if len(frames) == _EVENT_FRAMES else None
        if numbered is None or numbered[0] < 0:
            return []  # if it was a batch, the next batch shows the gap
        seq, payload = numbered
        return self._sequence.live(seq, _batch(payload), reconnected=has_reconnected)

    async def _take_reply(self, sockets: _Sockets) -> list[Item]:
        frames = await sockets.receive_reply()
        self.heard_s = time.monotonic()
        numbered = _numbered(frames) if len(frames) in _REPLY_FRAMES else None
        if numbered is None:
            self._is_replay_sound = False
            return []
        seq, payload = numbered
        if seq == _END_SEQ:
            return self._end_replay(sockets, complete=self._is_replay_sound)
        items = self._sequence.replayed(seq, _batch(payload))
        if items:
            self._replay_deadline_s = _now_s() + self._replay_timeout_s
        if Restarted() in items:
            sockets.resubscribe()
        return items

    def _end_replay(self, sockets: _Sockets, *, complete: bool) -> list[Item]:
        self._replay_deadline_s = None
        if not complete:
            sockets.drop_replay()
        items = self._sequence.ended(complete=complete)
        if complete and Restarted() in items:
            sockets.resubscribe()
        return items


class _Source(Enum):
    EVENTS = auto()
    REPLAY = auto()


class _Sockets:
    """A SUB socket with its monitor, and a DEALER socket. A new socket yields nothing that came before it."""

    def __init__(self, events_endpoint: str, hwm: int) -> None:
        self._context = zmq.asyncio.Context()
        self._events_endpoint = events_endpoint
        self._hwm = hwm
        self._replay: zmq.asyncio.Socket | None = None
        self._subscribe()

    def _subscribe(self) -> None:
        self._events = self._socket(zmq.SUB)
        self._events.subscribe(b"")
        self._monitor = self._events.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._is_away = False
        self._has_reconnected = False
        try:
            self._events.connect(self._events_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def resubscribe(self) -> None:
        self._unsubscribe()
        self._subscribe()

    def _unsubscribe(self) -> None:
        self._events.disable_monitor()
        self._monitor.close()
        self._events.close()

    async def request_replay(self, endpoint: str, start_seq: int) -> None:
        if self._replay is None:
            self._replay = self._socket(zmq.DEALER)
            self._replay.connect(endpoint)
        await self._replay.send_multipart([b"", start_seq.to_bytes(8, "big")])

    def drop_replay(self) -> None:
        """Drop the replay's socket: its remaining answers would be taken for a part of the next replay."""
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    async def wait(self, patience_s: float, *, live: bool, replies: bool) -> _Source | None:
        """The socket that has a message, of those asked for, replies first; None if none has within `patience_s`."""
        poller = zmq.asyncio.Poller()
        if live:
            poller.register(self._events, zmq.POLLIN)
        if replies and self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        ready = dict(await poller.poll(patience_s * 1000))
        if self._replay in ready:
            return _Source.REPLAY
        return _Source.EVENTS if ready else None

    async def receive_live(self) -> tuple[list[bytes], bool]:
        """The frames of one waiting message, and whether the connection is new since the message before."""
        # The monitor tells of a connection before its first message arrives, so it is read after the message came.
        while await self._monitor.poll(0):
            event = parse_monitor_message(await self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            self._has_reconnected |= self._is_away and event == zmq.EVENT_CONNECTED
            self._is_away = event == zmq.EVENT_DISCONNECTED
        has_reconnected, self._has_reconnected = self._has_reconnected, False
        return await self._events.recv_multipart(zmq.NOBLOCK), has_reconnected

    async def receive_reply(self) -> list[bytes]:
        assert self._replay is not None
        return await self._replay.recv_multipart(zmq.NOBLOCK)

    def close(self) -> None:
        self.drop_replay()
        self._unsubscribe()
        self._context.term()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = self._hwm
        # ZMQ's own heartbeats are not used: with a full queue, one aborts the process (zeromq/libzmq#3937).
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _KEEPALIVE_S
        return socket


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """The number and the payload at the end of the frames; None if the number is malformed."""
    seq_bytes, payload = frames[-2:]
    if len(seq_bytes) < _SEQ_BYTES:
        return None
    return int.from_bytes(seq_bytes[:_SEQ_BYTES], "big", signed=True), payload


def _batch(payload: bytes) -> Batch | None:
    try:
        return decode(payload)
    except EventError:
        return None
