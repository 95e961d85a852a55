"""A real ZeroMQ subscription to one rank's KV events, live and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from coordinator.agent.kv_events import Batch, Event, decode

_PATIENCE_S = 10.0
_POLL_MS = 50
END = b"\xff" * 8


@dataclass(frozen=True)
class Message:
    frames: list[bytes]

    @property
    def seq(self) -> int:
        return int.from_bytes(self.frames[-2], "big")

    @property
    def payload(self) -> bytes:
        return self.frames[-1]

    @property
    def batch(self) -> Batch:
        return decode(self.payload)

    @property
    def rank(self) -> int:
        """The data-parallel rank that published it."""
        rank: int = msgspec.msgpack.decode(self.payload)[2]
        return rank

    @property
    def raw(self) -> list[Any]:
        """The batch's events as plain maps or arrays."""
        events: list[Any] = msgspec.msgpack.decode(self.payload)[1]
        return events


class Subscription:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay_endpoint: str | None) -> None:
        self._live = zmq.asyncio.Socket(context, zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay = zmq.asyncio.Socket(context, zmq.DEALER)
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)
        self._next_seq = 0

    def close(self) -> None:
        self._live.close(linger=0)
        self._replay.close(linger=0)

    async def poll(self) -> bool:
        """Whether a live batch is available or arrives very soon."""
        return bool(await self._live.poll(_POLL_MS))

    async def live(self) -> Message:
        async with asyncio.timeout(_PATIENCE_S):
            message = Message(await self._live.recv_multipart())
        self._next_seq = max(self._next_seq, message.seq + 1)
        return message

    async def ask(self, *frames: bytes) -> None:
        await self._replay.send_multipart(frames)

    async def reply(self) -> Message:
        async with asyncio.timeout(_PATIENCE_S):
            return Message(await self._replay.recv_multipart())

    async def replay(self, start: int = 0) -> list[Message]:
        """The ring's batches from `start` on, without the end mark."""
        await self.ask(b"", start.to_bytes(8, "big"))
        messages = [await self.reply()]
        while messages[-1].frames[-2] != END:
            messages.append(await self.reply())
        return messages[:-1]

    async def new(self) -> list[Message]:
        """All live batches since the last one that was received. A replay must contain the same batches."""
        kept = await self.replay(self._next_seq)
        received = [await self.live() for _ in kept]
        assert [message.frames for message in received] == [message.frames[1:] for message in kept]
        return received

    async def new_events(self) -> list[Event]:
        return [event for message in await self.new() for event in message.batch.events]


@contextmanager
def subscribed(endpoint: str, replay_endpoint: str | None = None) -> Iterator[Subscription]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscription = Subscription(context, endpoint, replay_endpoint)
    try:
        yield subscription
    finally:
        subscription.close()
        context.term()
