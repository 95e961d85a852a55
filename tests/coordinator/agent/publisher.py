"""An engine's event publisher for tests: vLLM's sockets and framing, and faults on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from coordinator.agent.batch_sequence import Received
from coordinator.agent.kv_events import decode
from gateway.tasks import Tasks

TOPIC = b"kv@replica-0@model"
END_SEQ = (-1).to_bytes(8, "big", signed=True)
_TS = itertools.count(1_000_000)
"""One clock for all lives of all engines."""


def payload(ts: float) -> bytes:
    return msgspec.msgpack.encode([ts, [], 0])


_ANY = "tcp://127.0.0.1:*"


class Publisher:
    """Two bound sockets. The event socket is an XPUB, which sees subscribers; on the wire it is the same as a PUB."""

    def __init__(self, has_topic_in_replays: bool = True, endpoints: tuple[str, str] = (_ANY, _ANY)) -> None:
        self.asked: list[int] = []
        """The first batch number of each replay request."""
        self.is_mute = False
        """No replay is answered."""
        self.is_slow = False
        """The replies to a replay request are fixed when the request arrives, but sent only after a later request."""
        self.is_garbled = False
        """Replies have one frame too many."""
        self.reply_pause_s = 0.0
        self.subscribed = asyncio.Event()
        self._unsent_replies: list[list[bytes]] = []
        self._ring: deque[tuple[int, bytes]] = deque()
        self._has_topic_in_replays = has_topic_in_replays
        self._next_seq = 0
        self.life = b""
        """What follows a batch's number in its frame: with snapshots on, 16 bytes that name the engine's process."""
        self._tasks = Tasks()
        self.events_endpoint, self.replay_endpoint = endpoints
        self._bind()

    def _bind(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = zmq.asyncio.Socket(self._context, zmq.XPUB)
        self._replays = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        for socket in (self._live, self._replays):
            socket.linger = 0
        self._live.bind(self.events_endpoint)
        self._replays.bind(self.replay_endpoint)
        self.events_endpoint = _endpoint(self._live)
        self.replay_endpoint = _endpoint(self._replays)
        self._tasks.spawn(self._watch_subscribers(), "subscribers")
        self._tasks.spawn(self._answer_replays(), "replays")

    async def publish(self, count: int = 1, *, is_dropped: bool = False) -> list[Received]:
        """Publishes the next batches. Dropped batches are in the ring, but reach no subscriber."""
        published = []
        for _ in range(count):
            body = payload(next(_TS))
            published.append(Received(self._next_seq, decode(body)))
            await self.publish_payload(body, is_dropped=is_dropped)
        return published

    async def publish_payload(self, body: bytes, seq: int | None = None, *, is_dropped: bool = False) -> None:
        seq = self._next_seq if seq is None else seq
        self._next_seq = seq + 1
        if not is_dropped:
            await self.send([TOPIC, seq.to_bytes(8, "big") + self.life, body])
        self._ring.append((seq, body))

    async def send(self, frames: list[bytes]) -> None:
        """Sends any frames."""
        await self._live.send_multipart(frames)

    async def crash(self) -> None:
        """The engine dies and loses all its state."""
        await self._tasks.close()
        self._live.close()
        self._replays.close()
        self._context.term()  # returns when the ports are free
        self._ring.clear()
        self._next_seq = 0
        self.subscribed.clear()

    async def restart(self) -> None:
        await self.crash()
        self._bind()

    async def close(self) -> None:
        if not self._context.closed:
            await self.crash()

    async def _watch_subscribers(self) -> None:
        while True:
            message = await self._live.recv()
            if message[:1] == b"\x01":
                self.subscribed.set()
            else:
                self.subscribed.clear()

    async def _answer_replays(self) -> None:
        while True:
            client, empty, start_seq_bytes = await self._replays.recv_multipart()
            assert empty == b""
            start_seq = int.from_bytes(start_seq_bytes, "big")
            self.asked.append(start_seq)
            if self.is_mute:
                continue
            self._unsent_replies += [[client, b"", *reply] for reply in self._replies(start_seq)]
            while self._unsent_replies and not self.is_slow:
                await asyncio.sleep(self.reply_pause_s)
                await self._replays.send_multipart(self._unsent_replies.pop(0))

    def _replies(self, start_seq: int) -> list[list[bytes]]:
        numbered = [(seq, body) for seq, body in self._ring if seq >= start_seq]
        replies = [[TOPIC, seq.to_bytes(8, "big") + self.life, body] for seq, body in numbered]
        replies.append([b"", END_SEQ, b""])
        if self.is_garbled:
            return [[*reply, b"?"] for reply in replies[:-1]] + replies[-1:]
        return replies if self._has_topic_in_replays else [reply[1:] for reply in replies]


def _endpoint(socket: zmq.asyncio.Socket) -> str:
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
