"""Hears which keys are written and which are evicted, where Redis publishes it (`notify-keyspace-events E$e`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hiredis

from coordinator.errors import StoreDown
from coordinator.redis.wire import _INCOMPLETE, Wire

SET, EVICTED = "set", "evicted"
Heard = Callable[[str, str], None]
"""Of an event's name and its key."""


class Listener(Wire):
    """A connection that only listens: what comes is what was subscribed to, and nobody waits for it."""

    async def listen(self, heard: Heard) -> None:
        """Subscribe to what happens in this connection's database. Raises StoreError where that is not allowed."""
        self._heard: Heard = heard
        database = self._connection.db
        self._events = {f"__keyevent@{database}__:{event}".encode(): event for event in (SET, EVICTED)}
        for channel in self._events:
            await self.send("SUBSCRIBE", channel)

    def data_received(self, data: bytes) -> None:
        replies = self._replies
        try:
            replies.feed(data)
            while (reply := replies.gets()) is not _INCOMPLETE:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._break(StoreDown(f"connection to Redis lost: {error}"))

    def _take(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] == b"message":
            _, channel, key = reply
            self._heard(self._events[channel], key.decode(errors="replace"))
        else:  # of SUBSCRIBE
            self._answer(self._pending.popleft(), reply)
