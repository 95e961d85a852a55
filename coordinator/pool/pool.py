"""One pool's shared state as one gateway uses it: place, settle, claim, withdraw, register, reassert.

The gateway's live reservations are kept here as well: it states them again whenever the store may have lost or never
had them. Everything that is not `place` is written behind: sent in order on the same connection and not awaited. What
a broken connection swallows is repaired by the next reassertion, whose epoch refuses a place that runs only then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from coordinator.errors import StoreDown, StoreRefused
from coordinator.keys import PoolKeys
from coordinator.pool.ownership import Ownership, failed
from coordinator.pool.prefills import Prefills
from coordinator.redis.wire import Reply, Wire, fail
from coordinator.registry import PoolState, ReplicaRecord, parse_pool_state, still_known
from coordinator.scripts import BreakerKnobs, Placement, PlaceRequest, Reservation, Script, load, parse_placement

__all__ = ["PlaceRequest", "Pool", "Reservation"]

LEASE_MS = 3000
MAX_GAP_MS = 1000


def _not_connected() -> StoreDown:
    return StoreDown("the store is not connected")


def _down() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fail(future, _not_connected())
    return future


class Pool:
    """The store's client for one pool."""

    def __init__(self, name: str, gateway: str, budget_s: float, does_chores: bool = True, namespace: str = "") -> None:
        self.name = name
        self.keys = PoolKeys(name, namespace)
        self.gateway = gateway
        self.fleet: PoolState | None = None
        """The last heartbeat's view; None before the first."""
        self.unreadable: Counter[str] = Counter()  # records, by the key that they stood in: see repair.py
        self._budget_s = budget_s
        self.does_chores = does_chores
        self._epoch = 0
        self._wire: Wire | None = None
        self._allow_oom = True
        self._live: dict[str, Reservation] = {}
        self._placing: set[str] = set()
        self._ownership = Ownership(self.keys, self.run, self.tell, self.read)
        self.prefills = Prefills(self.keys, self._live, self.read, self.first_token)
        self._records: dict[str, ReplicaRecord] = {}
        self._settled: list[tuple[str, str]] = []

    def __repr__(self) -> str:
        return f"<Pool {self.name}, epoch {self._epoch}, {len(self._live)} live, {len(self._placing)} placing>"

    @property
    def live(self) -> dict[str, Reservation]:
        """This gateway's requests in flight, by reservation id."""
        return self._live

    @property
    def is_worker(self) -> bool:
        """Whether this gateway does the pool's chores, as the last heartbeat had it."""
        return self.fleet is not None and self.fleet.worker == self.gateway

    @property
    def records(self) -> dict[str, ReplicaRecord]:
        """Every replica known to this gateway: from the store, or discovered while the store was away."""
        return self._records

    # -- connection ------------------------------------------------------------------------------------------

    def attach(self, wire: Wire, allow_oom: bool) -> None:
        """Use a new connection: everything this gateway knows is stated again on it before anything else."""
        self._wire, self._allow_oom = wire, allow_oom
        self.reassert()
        self._ownership.repair()

    def detach(self) -> None:
        """The connection is gone: calls fail at once as StoreDown."""
        self._wire = None
        self._settled.clear()
        self._ownership.disconnected()

    def reassert(self) -> None:
        """Raise the epoch and state replicas and live reservations again. Sent at once; calls may follow behind it."""
        for record in self._records.values():
            self._state("register", **record.register_arguments(only_if_absent=True))
        self._epoch += 1
        live = [(one.id, one.replica, one.incarnation, one.backlog_tokens, one.tip) for one in self._live.values()]
        self._state(
            "reassert", gateway=self.gateway, epoch=self._epoch, lease_ms=LEASE_MS, kept=self._placing, live=live
        )

    def _state(self, name: str, **arguments: Any) -> None:
        """Sent with its text: after a NOSCRIPT it would run again, behind calls that it must come before."""
        script = self._script(name)
        operands = script.operands(self.keys, **arguments)
        if self._wire is not None:
            self._wire.send("EVAL", script.text, *operands)

    def _script(self, name: str) -> Script:
        return load(name, self._allow_oom)

    def run(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        """Run one of the scripts, with the arguments that its header names."""
        script = self._script(name)
        operands = script.operands(self.keys, **arguments)
        return _down() if self._wire is None else self._wire.run(script, operands)

    def tell(self, name: str, on_reply: Reply | None = None, is_urgent: bool = False, /, **arguments: Any) -> None:
        """Run one of the scripts behind everything that was sent before: see Wire.tell."""
        script = self._script(name)
        operands = script.operands(self.keys, **arguments)
        if self._wire is not None:
            self._wire.tell(script, operands, on_reply, is_urgent)
        elif on_reply is not None:
            on_reply(_not_connected())

    # -- placing ---------------------------------------------------------------------------------------------

    async def place(self, request: PlaceRequest) -> Placement | None:
        """Choose a replica and reserve; None when no replica is left. The one awaited call of a request.

        Raises StoreError (down, late, refused): nothing is then reserved in this gateway's name, or will be undone
        as soon as the late reply tells what was.
        """
        for last_try in (False, True):
            if self._wire is None:
                raise _not_connected()
            epoch = self._epoch
            self._placing.add(request.reservation)
            try:
                placement = await self._ask(self._wire, request)
                if isinstance(placement, Placement):
                    self._accept(request, placement)
                    return placement
            finally:
                self._placing.discard(request.reservation)
            if placement == "none":
                self._live.pop(request.release, None)
                if last_try or not any(request.admits(record) for record in self._records.values()):
                    return None  # else the store has lost what this gateway knows: state it again
            elif last_try:
                break
            if epoch == self._epoch:
                self.reassert()
        raise StoreDown("the store does not know this gateway's epoch")

    async def _ask(self, wire: Wire, request: PlaceRequest) -> Placement | str:
        """The reply to one place; one that the caller does not live to see is undone when it comes."""
        script = self._script("place")
        operands = request.operands(script, self.keys, self.gateway, self._epoch, explain=False)
        reply = wire.run(script, operands, self._budget_s, partial(self._undo, request))
        self._ownership.expect(request)
        try:
            placement = parse_placement(await reply)
        except asyncio.CancelledError:
            if not failed(reply):  # cancelled in the turn in which it came
                self._undo(request, reply.result())
            raise
        except StoreRefused:
            self._ownership.answered(request)
            raise
        self._ownership.answered(request)
        return placement

    async def explain(self, request: PlaceRequest) -> bytes | None:
        """The decision that `place` would take now, as JSON with every cost term; nothing is written."""
        if self._wire is None:
            raise _not_connected()
        script = self._script("place")
        operands = request.operands(script, self.keys, self.gateway, self._epoch, explain=True)
        reply = await self._wire.run(script, operands, self._budget_s * 5)
        return bytes(reply[1]) if reply[0] == b"ok" else None

    def _accept(self, request: PlaceRequest, placement: Placement) -> None:
        self._live.pop(request.release, None)
        where = (placement.replica, placement.incarnation, placement.backlog_tokens)
        self._live[request.reservation] = Reservation(request.reservation, *where, request.tip, request.is_streamed)
        if placement.touch or placement.claimed_from:
            first = 0 if placement.touch else placement.claimed_from - 1
            self.hold(placement.replica, request.keys[first:])

    def _undo(self, request: PlaceRequest, late_reply: Any) -> None:
        """The caller gave up on this place before its reply came: take back what it did."""
        self._ownership.answered(request)
        placement = "refused" if isinstance(late_reply, Exception) else parse_placement(late_reply)
        if isinstance(placement, Placement):
            if request.reservation not in self._live:  # else adopted since, which has replaced it
                self._settle("done", request.reservation)
            self.withdraw(request, placement)

    # -- written behind --------------------------------------------------------------------------------------

    def adopt(self, reservation: Reservation) -> None:
        """Count a request that was placed without the store: now, or with the next reassertion."""
        self._live[reservation.id] = reservation
        self._epoch += 1
        self._state(
            "adopt",
            gateway=self.gateway,
            epoch=self._epoch,
            reservation=reservation.id,
            replica=reservation.replica,
            incarnation=reservation.incarnation,
            backlog_tokens=reservation.backlog_tokens,
            tip=reservation.tip,
        )

    def first_token(self, reservation: str) -> None:
        """The prefill is over: give its backlog back."""
        live = self._live.get(reservation)
        if live is not None and live.backlog_tokens:
            live.backlog_tokens = 0
            self._settle("first_token", reservation)

    def done(self, reservation: str) -> None:
        """The request is over, however it ended; its client may ask on at once. Harmless when repeated."""
        if self._live.pop(reservation, None) is not None:
            self._settle("done", reservation)

    def _settle(self, what: str, reservation: str) -> None:
        if self._wire is None:
            return
        if not self._settled:
            asyncio.get_running_loop().call_soon(self._send_settled)
        self._settled.append((what, reservation))

    def _send_settled(self) -> None:
        if self._settled:
            batch, self._settled = self._settled, []
            self.tell("settle", None, True, gateway=self.gateway, settled=batch)

    def withdraw(self, request: PlaceRequest, placement: Placement) -> None:
        """Nothing was computed for this placement: take back the claims that it made."""
        if placement.claimed_from:
            self._ownership.withdraw(placement.replica, request, placement.claimed_from - 1)

    def confirm(self, request: PlaceRequest, placement: Placement) -> None:
        """The replica has computed the prompt; where an agent tells what it holds, its events have to confirm that."""
        if placement.claimed_from:
            self._ownership.await_events(placement.replica, request, placement.claimed_from - 1)

    def drop(self, replica: str, before_ms: int, keys: Sequence[str]) -> asyncio.Future[Any]:
        """Drop a replica's ownership of `keys`, where last used before `before_ms`; the future counts them."""
        return self._ownership.drop(replica, before_ms, keys)

    def hold(self, replica: str, keys: Sequence[str]) -> None:
        """Record keys, shallow to deep, under the replica that owns them."""
        self._ownership.hold(replica, keys)

    def report(self, replica: str, incarnation: str, outcome: str, knobs: BreakerKnobs, successes: int = 0) -> None:
        """To a replica's shared breaker: a `failure`, with the successes not told of yet; or a probe's `success`."""
        self.tell(
            "report",
            replica=replica,
            incarnation=incarnation,
            outcome=outcome,
            min_failures=knobs.failures,
            error_rate=knobs.error_rate,
            window_ms=knobs.window_ms,
            open_ms=knobs.open_ms,
            successes=successes,
        )

    def register(self, record: ReplicaRecord, only_if_absent: bool = False) -> asyncio.Future[Any]:
        """Make a replica known, or correct what is known of it; a new incarnation inherits nothing."""
        self._records[record.replica] = record
        return self.run("register", **record.register_arguments(only_if_absent))

    # -- heartbeat -------------------------------------------------------------------------------------------

    async def beat(self, leaving: bool = False) -> PoolState:
        """Renew the lease and learn the fleet; reassert where the store forgot us."""
        epoch = self._epoch
        reply = await self.run(
            "beat",
            gateway=self.gateway,
            epoch=epoch,
            lease_ms=LEASE_MS,
            max_gap_ms=MAX_GAP_MS,
            leaving=leaving,
            does_chores=self.does_chores,
        )
        fleet = parse_pool_state(reply, self.fleet)
        if not fleet.known and epoch == self._epoch and not leaving:
            self.reassert()
        elif not leaving:
            self._records = still_known(self._records, self.fleet, fleet)
        self.fleet = fleet
        self._ownership.lapse(fleet.is_exact)
        self.prefills.look(fleet)
        return fleet

    def take_back(self, replica: str, reservation: str, chain: Sequence[str]) -> asyncio.Future[Any]:
        """Withdraw what a dead gateway's reservation claimed of a chain; the future counts the claims."""
        return self._ownership.take_back(replica, reservation, chain)

    def hold_at_once(self, replica: str, keys: Sequence[str]) -> None:
        """Record keys, shallow to deep, under the replica that owns them, before whatever is sent from now on."""
        self._ownership.hold_at_once(replica, keys)

    def read(self, *command: Any, at_once: bool = False) -> asyncio.Future[Any]:
        """A plain command off the hot path; `at_once`: it is on its way before this returns."""
        return _down() if self._wire is None else self._wire.send(*command, at_once=at_once)
