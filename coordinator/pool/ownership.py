"""Who owns which keys, as one gateway writes it behind its placements.

A claim that no `held` set lists would never be trimmed, and one whose request never ran would be believed for long.
So what a broken connection swallowed is remembered here, and said again on the next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coordinator.errors import StoreError
from coordinator.keys import PoolKeys
from coordinator.registry import readable
from coordinator.scripts import PlaceRequest

_MAX_REMEMBERED = 4096
_HELD_AT_ONCE = 1024
CONFIRM_S = 2.0
"""An engine's events tell of a prompt within this time of its first token, or not at all."""


def failed(future: asyncio.Future[Any]) -> bool:
    """Whether a future holds no result: it is pending, cancelled, or holds an error."""
    return not future.done() or future.cancelled() or future.exception() is not None


class Ownership:
    """Holds, withdraws and drops keys. `run(script, **arguments)`, `tell(script, on_reply, **arguments)` and
    `read(*command)` are the pool's."""

    def __init__(
        self,
        keys: PoolKeys,
        run: Callable[..., asyncio.Future[Any]],
        tell: Callable[..., None],
        read: Callable[..., asyncio.Future[Any]],
    ) -> None:
        self._keys = keys
        self._run = run
        self._tell = tell
        self._read = read
        self._unanswered: dict[str, PlaceRequest] = {}
        self._lost: deque[PlaceRequest] = deque(maxlen=_MAX_REMEMBERED)
        self._unconfirmed: deque[tuple[float, str, PlaceRequest, int]] = deque()
        self._to_hold: dict[str, dict[str, None]] = {}
        self._unheld: deque[tuple[str, Sequence[str]]] = deque(maxlen=_MAX_REMEMBERED)

    def expect(self, request: PlaceRequest) -> None:
        """A place was sent: until its reply is seen it may have claimed keys."""
        self._unanswered[request.reservation] = request

    def answered(self, request: PlaceRequest) -> None:
        """Its reply was seen, by the caller or too late."""
        self._unanswered.pop(request.reservation, None)

    def disconnected(self) -> None:
        """No more replies will come on this connection."""
        self._lost.extend(self._unanswered.values())
        self._unanswered.clear()

    def repair(self) -> None:
        """On a new connection: withdraw what lost places may have claimed, hold what may not be held."""
        lost, unheld = list(self._lost), list(self._unheld)
        self._lost.clear()
        self._unheld.clear()
        for replica, keys in unheld:
            self.hold(replica, keys)
        for request in lost:
            if request.keys:
                owners = self._read("HGETALL", self._keys.own(request.tip))
                owners.add_done_callback(partial(self._withdraw_lost, request))

    def _withdraw_lost(self, request: PlaceRequest, owners: asyncio.Future[Any]) -> None:
        if failed(owners):
            self._lost.append(request)
            return
        flat = owners.result()
        for replica, record in zip(flat[::2], flat[1::2], strict=True):
            if readable(record).endswith(f" {request.reservation}"):
                self.withdraw(readable(replica), request)

    def hold(self, replica: str, keys: Sequence[str]) -> None:
        """Record keys, shallow to deep, under the replica that owns them."""

        if not self._to_hold:
            asyncio.get_running_loop().call_soon(self._send_holds)
        self._to_hold.setdefault(replica, {}).update(dict.fromkeys(keys))

    def hold_at_once(self, replica: str, keys: Sequence[str]) -> None:
        """The same, in front of whatever is sent from now on."""
        self.hold(replica, keys)
        self._send_holds()

    def _send_holds(self) -> None:
        """Those of one turn of the event loop together."""
        to_hold, self._to_hold = self._to_hold, {}
        for replica, of_replica in to_hold.items():
            everything = list(of_replica)
            for start in range(0, len(everything), _HELD_AT_ONCE):
                keys = everything[start : start + _HELD_AT_ONCE]
                self._tell("hold", partial(self._check_hold, replica, keys), replica=replica, keys=keys)

    def _check_hold(self, replica: str, keys: Sequence[str], reply: Any) -> None:
        if isinstance(reply, StoreError):
            self._unheld.append((replica, keys))

    def withdraw(self, replica: str, request: PlaceRequest, first: int = 0) -> None:
        """Take back what the request claimed for `replica`, from the key at index `first` on."""

        def check(reply: Any) -> None:
            if isinstance(reply, StoreError):
                self._lost.append(request)

        keys = request.keys[first:]
        self._send_holds()  # in the order in which they were said
        self._tell("withdraw", check, replica=replica, reservation=request.reservation, keys=keys)

    def take_back(self, replica: str, reservation: str, keys: Sequence[str]) -> asyncio.Future[Any]:
        """Withdraw the claims that a reservation made; the future counts them."""
        self._send_holds()
        return self._run("withdraw", replica=replica, reservation=reservation, keys=keys)

    def await_events(self, replica: str, request: PlaceRequest, first: int) -> None:
        """The claims that the request made lapse soon, unless its engine's events confirm them (see `lapse`)."""
        due_s = time.monotonic() + CONFIRM_S
        self._unconfirmed.append((due_s, replica, request, first))

    def lapse(self, is_exact: Callable[[str], bool]) -> None:
        """Take back the claims whose time to be confirmed is over; what became resident is no claim any more. Where
        nobody tells what a replica holds they stay; if an agent comes, the worker sweeps out what it does not confirm.
        """
        now_s = time.monotonic()
        while self._unconfirmed and self._unconfirmed[0][0] <= now_s:
            _, replica, request, first = self._unconfirmed.popleft()
            if not is_exact(replica):
                continue
            tip = self._read("HGET", self._keys.own(request.tip), replica)
            tip.add_done_callback(partial(self._lapse_unless_confirmed, replica, request, first))

    def _lapse_unless_confirmed(
        self, replica: str, request: PlaceRequest, first: int, tip: asyncio.Future[Any]
    ) -> None:
        """Nearly always the tip is resident by now, and with it all that lies before it: then nothing is left to do."""
        if failed(tip):
            self._lost.append(request)
            return
        fields = readable(tip.result()).split(" ") if tip.result() else []
        if not fields or (fields[1:2] == ["claim"] and fields[6:7] == [request.reservation]):
            self.withdraw(replica, request, first)

    def drop(self, replica: str, before_ms: int, keys: Sequence[str]) -> asyncio.Future[Any]:
        """Drop a replica's ownership of `keys`, where last used before `before_ms`; the future counts them."""
        self._send_holds()
        return self._run("drop", replica=replica, before_ms=before_ms, keys=keys)
