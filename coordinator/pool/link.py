"""The connection of one pool to the store, as one gateway uses it: how its scripts and commands are sent.

Everything goes over one connection, in order. A request awaits its placement, and, if another replica has computed its
prompt, what tells whether that is stored (stored_chunks.py). Everything else is written behind: sent without waiting.
"""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.errors import StoreDown
from coordinator.keys import PoolKeys
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.redis_clock import RedisClock
from coordinator.redis.time_limit import fail
from coordinator.redis.wire import Reply, Wire
from coordinator.scripts import Script


class Link:
    """One for each pool, for as long as the pool lives; connections come and go."""

    def __init__(self, name: str, gateway: str, namespace: str = "") -> None:
        self.keys = PoolKeys(name, namespace)
        self.gateway = gateway
        self.wire: Wire | None = None
        """None while there is no connection: calls fail at once with StoreDown."""
        self.is_paused = False
        """Whether placements fail at once, though there is a connection: see StoreConnection."""
        self.epoch = 0
        """Raised whenever this gateway states what it has reserved: the store refuses a placement of an older one."""
        self.clock = RedisClock()
        self._place_of: tuple[PolicyKnobs, Script] | None = None
        """The settings of the last placement, and their script."""

    def attach(self, wire: Wire, is_in_cluster: bool) -> None:
        """Use a new connection."""
        self.keys = PoolKeys(self.keys.pool, self.keys.namespace, is_in_cluster)
        self.wire, self._place_of, self.is_paused = wire, None, False
        self.clock.forget()

    def placing_wire(self) -> Wire:
        """The connection for a placement. Raises StoreDown if there is none, or placements are paused."""
        wire = self.required()
        if self.is_paused:
            raise StoreDown("placements are paused, because the store was late")
        return wire

    def required(self) -> Wire:
        """The connection. Raises StoreDown if there is none."""
        if self.wire is None:
            raise not_connected()
        return self.wire

    def place_script(self, knobs: PolicyKnobs) -> Script:
        """Most requests have the same settings; to look the script up by their values takes a microsecond."""
        if self._place_of is None or self._place_of[0] is not knobs:
            self._place_of = knobs, self.required().script("place", knobs)
        return self._place_of[1]

    def run(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        """Run one of the scripts, with the arguments that its header declares."""
        return _down() if self.wire is None else self.wire.ask_script(name, self.keys, **arguments)

    def tell(self, name: str, on_reply: Reply | None = None, is_urgent: bool = False, /, **arguments: Any) -> None:
        """Run one of the scripts, behind everything that was sent before: see Wire.tell."""
        if self.wire is not None:
            script = self.wire.script(name)
            self.wire.tell(script, script.operands(self.keys, **arguments), on_reply, is_urgent)
        elif on_reply is not None:
            on_reply(not_connected())

    def flush(self) -> None:
        """What was sent is on its way before this returns."""
        if self.wire is not None:
            self.wire.flush()

    def restate(self, name: str, on_reply: Reply | None = None, /, **arguments: Any) -> None:
        """Send a script with its text: after a NOSCRIPT it would run again, behind calls that it must precede."""
        if self.wire is not None:
            script = self.wire.script(name)
            sent = self.wire.send("EVAL", script.text, *script.operands(self.keys, **arguments))
            if on_reply is not None:
                sent.add_done_callback(lambda sent: sent.cancelled() or on_reply(sent.exception() or sent.result()))

    def read(self, *command: Any, at_once: bool = False) -> asyncio.Future[Any]:
        """A plain command, outside the request path; with `at_once` it is on its way before this returns."""
        return _down() if self.wire is None else self.wire.send(*command, at_once=at_once)


def not_connected() -> StoreDown:
    return StoreDown("the store is not connected")


def _down() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fail(future, not_connected())
    return future
