"""What a gateway writes about ownership behind its placements: holds, and claims that are confirmed or taken back.

A claim whose prompt was computed has to be confirmed by the engine's events. A claim whose prompt was not is withdrawn.
A hold lists a replica's keys in `held`. A claim that no `held` set lists would never be trimmed, and a claim whose
request never ran would be believed for long. So claims and holds that were lost with a connection are remembered, and
repaired on the next connection.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from coordinator.errors import StoreError
from coordinator.placement import Placement, PlaceRequest
from coordinator.pool.link import Link
from coordinator.redis.wire import has_result
from coordinator.registry import PoolState, readable

CONFIRM_S = 2.0
"""An engine's events tell of a prompt within this time of its end, or not at all. Until then its blocks stay there."""
_MAX_REMEMBERED = 4096
_HELD_AT_ONCE = 1024


_Claim = tuple[str, tuple[str, ...]]
"""A reservation, and the keys that it claimed, shallow to deep, at least one. Thousands of these wait for CONFIRM_S, so
they are plain tuples of strings, which the garbage collector does not visit again and again."""


class Claims:
    """One gateway's holds and claims in one pool."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._to_hold: dict[str, dict[str, None]] = {}
        self._unconfirmed: deque[tuple[float, str, _Claim]] = deque()
        """When the engine's events must have confirmed a claim, and its replica: the oldest first."""
        self._lost_claims: deque[_Claim] = deque(maxlen=_MAX_REMEMBERED)
        self._lost_holds: deque[tuple[str, Sequence[str]]] = deque(maxlen=_MAX_REMEMBERED)

    def __repr__(self) -> str:
        return f"<Claims {len(self._unconfirmed)} unconfirmed, {len(self._lost_claims)} lost>"

    def withdraw(self, request: PlaceRequest, placement: Placement) -> None:
        """Nothing was computed for this placement: take back the claims that it made."""
        if placement.claimed_from:
            self._withdraw(placement.replica, _claim(request, placement.claimed_from))

    def confirm(self, request: PlaceRequest, placement: Placement, had_tokens: int = 0) -> None:
        """The replica has computed the prompt, and its request is over. If an agent tells what the replica holds, the
        engine's events have to confirm the claims within CONFIRM_S: but they tell nothing of `had_tokens`, which the
        engine had."""
        first = max(placement.claimed_from, bisect_right(request.tokens, had_tokens) + 1)
        if placement.claimed_from and first <= len(request.keys):
            claim = _claim(request, first)
            self._unconfirmed.append((time.monotonic() + CONFIRM_S, placement.replica, claim))

    def hold(self, replica: str, keys: Sequence[str]) -> None:
        """Record keys, shallow to deep, under the replica that owns them."""
        if not self._to_hold:
            asyncio.get_running_loop().call_soon(self._send_holds)
        self._to_hold.setdefault(replica, {}).update(dict.fromkeys(keys))

    def hold_at_once(self, replica: str, keys: Sequence[str]) -> None:
        """The same, sent before every later call."""
        self.hold(replica, keys)
        self._send_holds()

    def _send_holds(self) -> None:
        """The holds of one turn of the event loop, together."""
        to_hold, self._to_hold = self._to_hold, {}
        for replica, of_replica in to_hold.items():
            everything = list(of_replica)
            for start in range(0, len(everything), _HELD_AT_ONCE):
                keys = everything[start : start + _HELD_AT_ONCE]
                self._link.tell("hold", partial(self._check_hold, replica, keys), replica=replica, keys=keys)

    def _check_hold(self, replica: str, keys: Sequence[str], reply: Any) -> None:
        if isinstance(reply, StoreError):
            self._lost_holds.append((replica, keys))

    def take_back(self, replica: str, reservation: str, keys: Sequence[str]) -> asyncio.Future[Any]:
        """Withdraw the claims that a dead gateway's reservation made; the future counts them."""
        self._send_holds()
        return self._link.run("withdraw", replica=replica, reservation=reservation, keys=keys)

    def _withdraw(self, replica: str, claim: _Claim) -> None:
        """Take back a claim for `replica`."""
        reservation, keys = claim

        def check(reply: Any) -> None:
            if isinstance(reply, StoreError):
                self._lost_claims.append(claim)

        self._send_holds()  # holds that were asked for earlier must run first
        self._link.tell("withdraw", check, replica=replica, reservation=reservation, keys=keys)

    def void(self, replica: str, keys: Sequence[str]) -> None:
        """Take back all that the map says of these keys there."""
        self._send_holds()
        self._link.tell("withdraw", lambda _: None, replica=replica, reservation="", keys=keys)

    def lost(self, requests: Iterable[PlaceRequest]) -> None:
        """The connection is gone, and these placements may have claimed their keys."""
        self._lost_claims.extend(_claim(request) for request in requests if request.keys)

    def repair(self) -> None:
        """On a new connection: withdraw the claims that lost places may have made, and send lost holds again."""
        lost_claims, lost_holds = list(self._lost_claims), list(self._lost_holds)
        self._lost_claims.clear()
        self._lost_holds.clear()
        for replica, keys in lost_holds:
            self.hold(replica, keys)
        for claim in lost_claims:
            _, keys = claim
            owners = self._link.read("HGETALL", self._link.keys.own(keys[-1]))
            owners.add_done_callback(partial(self._withdraw_lost, claim))

    def _withdraw_lost(self, claim: _Claim, owners: asyncio.Future[Any]) -> None:
        if not has_result(owners):
            self._lost_claims.append(claim)
            return
        flat, (reservation, _) = owners.result(), claim
        for replica, record in zip(flat[::2], flat[1::2], strict=True):
            if readable(record).endswith(f" {reservation}"):
                self._withdraw(readable(replica), claim)

    def withdraw_unconfirmed(self, state: PoolState) -> None:
        """Take back claims that were not confirmed in time; keys that became resident are no claims any more. If no
        agent tells what a replica holds, its claims stay. If one comes later, the worker sweeps what it does not
        confirm.
        """
        now_s = time.monotonic()
        while self._unconfirmed and self._unconfirmed[0][0] <= now_s:
            _, replica, claim = self._unconfirmed.popleft()
            if state.is_told(replica):
                _, keys = claim
                tip = self._link.read("HGET", self._link.keys.own(keys[-1]), replica)
                tip.add_done_callback(partial(self._withdraw_unless_resident, replica, claim))

    def _withdraw_unless_resident(self, replica: str, claim: _Claim, tip: asyncio.Future[Any]) -> None:
        """Nearly always the tip is resident by now, and with it every key before it: then there is nothing to do."""
        if not has_result(tip):
            self._lost_claims.append(claim)
            return
        fields, (reservation, _) = readable(tip.result()).split(" ") if tip.result() else [], claim
        if not fields or (fields[1:2] == ["claim"] and fields[6:7] == [reservation]):
            self._withdraw(replica, claim)


def _claim(request: PlaceRequest, claimed_from: int = 1) -> _Claim:
    """The claim of a request that claimed its keys from this one on, counted from 1."""
    return request.reservation, tuple(request.keys[claimed_from - 1 :])
