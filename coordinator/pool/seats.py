"""Seats: the places in the queue of requests that found no room. A grant turns a seat into a placement.

Scripts grant seats as soon as there is room (lua/lib/grants.lua), and put their answers into the list
`grants:<gateway>`. This gateway takes them from there on a connection of its own, which waits in Redis. The connection
is opened when the first request has to wait. Nothing is polled.

An answer moves to `heard:<gateway>` when it is taken, and stays there until it was handed out. So a connection that
breaks loses none: the next one begins with what is there. A seat that the store has lost is found when the gateway
states what it has, and its request is placed again, with the time at which its wait began.

While the store is away, requests go on waiting. When it is away for longer than a moment, the gateway may place them
without it (`take`). Those that still wait when the store is back have their seats still, or get them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import orjson
import structlog

from coordinator.errors import NoRoom, StoreDown, StoreError, StoreRefused
from coordinator.placement import Placement, PlaceRequest, Reservation, Seat, parse_placement
from coordinator.pool.link import Link
from coordinator.pool.subsets import Subsets
from coordinator.redis.wire import Wire, has_result
from coordinator.subset import Subset

_log = structlog.get_logger("kvgate.seats")

_WAIT_S = 2.0
"""How long Redis waits for a grant until it answers that there is none: so a dead connection is noticed."""
_RETRY_S = 0.1
_AWAY_S = 1.0
"""When the store is away for longer, waiting requests may be placed without it."""
_HEARD_S = 10.0
"""A grant is heard within this time, or never: somebody else removed the seat."""
RESTATED_S = 1.0
"""Within this time, two heartbeats, all gateways have stated their requests again to a store that was emptied. Before,
it would take replicas for idle that are not."""
_AT_ONCE = 32
"""How many seats move to another queue in one step: some 2 ms of Redis' time."""
LOST, GONE, AGAIN = "lost", "gone", "again"
"""The store has lost the seat; the pool has no replica for the request any more; its tenant's limits have changed."""


class _Waiting:
    """One request that waits."""

    __slots__ = ("answer", "request")

    def __init__(self, request: PlaceRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[Placement | Reservation | str] = asyncio.get_running_loop().create_future()


Connect = Callable[[Callable[[StoreError], None]], Awaitable[Wire]]
"""Opens one more connection, which waits for grants. Its argument is told when the connection breaks."""


class Grants(Protocol):
    """Takes what the store has granted."""

    def accept(self, request: PlaceRequest, placement: Placement) -> None:
        """Somebody wants it."""

    def undo(self, request: PlaceRequest, placement: Placement | Reservation) -> None:
        """Nobody wants it any more."""

    def is_asked(self, reservation: str) -> bool:
        """Whether a placement under this name is on its way."""

    def forget(self, reservation: str) -> None:
        """This gateway does not know this request."""


class Seats:
    """One gateway's seats in one pool."""

    def __init__(self, link: Link, connect: Connect | None, grants: Grants) -> None:
        self._link, self._connect, self._grants = link, connect, grants
        self.on_away: Callable[[], None] = lambda: None
        """Called when requests may be placed without the store."""
        self.is_away = False
        """Whether they may."""
        self._waiting: dict[str, _Waiting] = {}
        self._left: dict[str, PlaceRequest] = {}
        """Requests that gave up, until the store says whether they still had their seats."""
        self._gone: dict[str, PlaceRequest] = {}
        """Those that gave up, or were placed without the store, while it was away: it may have granted their seats."""
        self._early: dict[str, Placement | str] = {}
        """Grants that came before the answer to their placement."""
        self._listener: asyncio.Task[None] | None = None
        self._away: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Seats {len(self._waiting)} waiting>"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def can_wait(self) -> bool:
        """Whether this gateway can hear of grants."""
        return self._connect is not None

    def requests(self) -> list[PlaceRequest]:
        """Those that wait."""
        return [one.request for one in self._waiting.values() if not one.answer.done()]

    def names(self) -> list[str]:
        """The seats that this gateway has."""
        return list(self._waiting)

    def follow(self, subsets: Subsets, serving_now: Callable[[PlaceRequest], Subset | None]) -> bool:
        """Replicas have come or gone: requests wait for those that serve their models now, where they waited before.
        If the store does not hear of it, it refuses their grants once their subset is gone, and they are placed again.
        Returns whether any moved.
        """
        moved: dict[Subset, list[str]] = {}
        for name, one in self._waiting.items():
            request, subset = one.request, serving_now(one.request)
            if subset and request.serving is not None and subset.digest != request.serving.digest:
                subsets.use(subset)
                request.is_served_by(subset)
                moved.setdefault(subset, []).append(name)
        for subset, names in moved.items():
            for start in range(0, len(names), _AT_ONCE):
                piece = names[start : start + _AT_ONCE]
                self._link.tell("requeue", None, True, gateway=self._link.gateway, digest=subset.digest, seats=piece)
        return bool(moved)

    def use_subsets(self, subsets: Subsets) -> None:
        """Keep the subsets alive on which requests wait."""
        for one in self._waiting.values():
            if one.request.serving is not None:
                subsets.use(one.request.serving)
            if one.request.prefill is not None:
                subsets.use(one.request.prefill.serving)

    async def wait(self, request: PlaceRequest, seat: Seat, limit_s: float | None) -> Placement | Reservation | str:
        """Wait for the grant, or for what `take` hands out. Returns a status if the request has to be placed again.

        Raises NoRoom after `limit_s`, StoreDown if this gateway may not hear of grants.
        """
        one = _Waiting(request)
        self._waiting[request.reservation] = one
        if (early := self._early.pop(request.reservation, None)) is not None:
            self._hand_out(request.reservation, early)
        elif self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(self._listen())
        try:
            async with asyncio.timeout(limit_s):
                return await one.answer
        except BaseException as error:
            if self._waiting.pop(request.reservation, None) is not None:
                self.leave(request)
            elif has_result(one.answer) and not isinstance(granted := one.answer.result(), str):
                self._grants.undo(request, granted)  # granted in the turn of the loop in which its client left
            if isinstance(error, TimeoutError):
                raise NoRoom("waited", seat.expected_ms / 1000) from None
            raise

    def leave(self, request: PlaceRequest) -> None:
        """Give a seat up. If it was granted meanwhile, the placement is undone as soon as that is heard."""
        reservation = request.reservation
        if (early := self._early.pop(reservation, None)) is not None:
            if isinstance(early, Placement):
                self._grants.undo(request, early)
            return
        self._left[reservation] = request
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(self._listen())

        def check(reply: Any) -> None:
            if isinstance(reply, StoreError):
                if self._left.pop(reservation, None) is not None:
                    self._gone[reservation] = request
            else:
                asyncio.get_running_loop().call_later(0 if reply > 0 else _HEARD_S, self._left.pop, reservation, None)

        self._link.tell("leave", check, True, gateway=self._link.gateway, seats=[reservation])

    def send_away(self, reservation: str, status: str = GONE) -> None:
        """No replica of this pool can serve the request any more, and another pool can. Or it is to be asked AGAIN."""
        one = self._waiting.get(reservation)
        if one is not None:
            self._answer(reservation, status)
            self.leave(one.request)

    def take(self, reservation: Reservation) -> None:
        """The gateway has placed this request without the store. The next reassertion ends its seat, or its grant is
        undone when it is heard."""
        self._gone[reservation.id] = self._waiting[reservation.id].request
        self._answer(reservation.id, reservation)

    # -- the store comes and goes ------------------------------------------------------------------------------

    def attached(self) -> None:
        """The pool's connection is new, or the store may have lost data: find the seats that are lost."""
        if self._away is not None:
            self._away.cancel()
            self._away = None
        self.is_away = False
        self._undo_grants_of_gone()
        if not self._waiting:
            return
        before, keys, gateway, read = list(self._waiting), self._link.keys, self._link.gateway, self._link.read
        # In this order: a seat that the first one does not find was granted before the others are read.
        replies = asyncio.gather(
            read("HKEYS", keys.seats(gateway)),
            read("LRANGE", keys.heard(gateway), 0, -1),
            read("LRANGE", keys.grants(gateway), 0, -1),
            return_exceptions=True,
        )

        def find_lost(found: asyncio.Future[Any]) -> None:
            if found.cancelled() or any(isinstance(each, BaseException) for each in found.result()):
                return  # the connection is gone again
            seats, heard, granted = found.result()
            known = {seat.decode(errors="replace") for seat in seats}
            known |= {name for name, _ in map(_read, [*heard, *granted])}
            lost = [name for name in before if name not in known]
            asyncio.get_running_loop().call_later(RESTATED_S, self._place_again, lost)

        replies.add_done_callback(find_lost)

    def _undo_grants_of_gone(self) -> None:
        """Listen for a while, because a grant claims keys, which nobody else would take back."""
        for name, request in self._gone.items():
            self._left[name] = request
            asyncio.get_running_loop().call_later(_HEARD_S, self._left.pop, name, None)
        self._gone.clear()
        if self._left and (self._listener is None or self._listener.done()):
            self._listener = asyncio.get_running_loop().create_task(self._listen())

    def _place_again(self, lost: list[str]) -> None:
        for name in lost:
            if name in self._waiting:
                self._answer(name, LOST)

    def check(self) -> None:
        """At a heartbeat: find out whether the store still has all seats."""
        if self._waiting:
            count, expected = self._link.read("HLEN", self._link.keys.seats(self._link.gateway)), len(self._waiting)
            count.add_done_callback(
                lambda count: self.attached() if has_result(count) and count.result() < expected else None
            )

    def detached(self) -> None:
        """The pool's connection is gone. For a moment, requests only wait for the next one."""
        self._early.clear()
        self._gone |= self._left
        self._left.clear()
        if self._away is None and not self.is_away:
            self._away = asyncio.get_running_loop().call_later(_AWAY_S, self._let_go)

    def _let_go(self) -> None:
        self._away = None
        self.is_away = True
        self.on_away()

    async def close(self) -> None:
        """Hear of no more grants. Returns when the connection is closed."""
        if self._away is not None:
            self._away.cancel()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    # -- grants ------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Take grants and hand them out as long as anybody waits."""
        while self._connect is not None and (self._waiting or self._left):
            try:
                wire = await self._connect(_broken)
                try:
                    await self._take(wire)
                finally:
                    await wire.close("nobody waits")
            except StoreRefused as error:
                if "NOPERM" in str(error):
                    self._stop_waiting(str(error))
                    return
                await asyncio.sleep(_RETRY_S)
            except StoreError:
                await asyncio.sleep(_RETRY_S)

    def _stop_waiting(self, reason: str) -> None:
        """This gateway may not hear of grants: from now on, its requests are placed though there is no room."""
        _log.warning("requests cannot wait for room", reason=reason, fix="give the Redis user +blmove")
        self._connect = None
        if self._waiting:
            self._link.tell("leave", None, True, gateway=self._link.gateway, seats=list(self._waiting))
        for one in list(self._waiting.values()):
            if not one.answer.done():
                one.answer.set_exception(StoreDown("this gateway may not hear of grants"))

    async def _take(self, wire: Wire) -> None:
        """Each grant leaves `heard` as soon as it is handed out: an old one must not answer a request that was placed
        again."""
        grants, heard = self._link.keys.grants(self._link.gateway), self._link.keys.heard(self._link.gateway)
        with suppress(StoreRefused):  # somebody else has written a key of another type
            for taken in await wire.send("LRANGE", heard, 0, -1):
                self._hear(taken)
        wire.send("UNLINK", heard)
        while self._waiting or self._left:
            granted = await wire.send("BLMOVE", grants, heard, "LEFT", "RIGHT", _WAIT_S, budget_s=2 * _WAIT_S)
            if granted is not None:
                self._hear(granted)
                wire.send("UNLINK", heard)
        await wire.send("PING")  # everything has been sent

    def _hear(self, granted: bytes) -> None:
        name, placement = _read(granted)
        if name in self._waiting:
            self._hand_out(name, placement)
        elif (request := self._left.pop(name, None) or self._gone.pop(name, None)) is not None:
            if isinstance(placement, Placement):
                self._grants.undo(request, placement)
        elif self._grants.is_asked(name):
            self._early[name] = placement
        elif isinstance(placement, Placement):
            self._grants.forget(name)

    def _hand_out(self, name: str, placement: Placement | str) -> None:
        one = self._waiting[name]
        if isinstance(placement, Placement):
            # Its client may have left in this turn of the loop.
            (self._grants.undo if one.answer.done() else self._grants.accept)(one.request, placement)
        self._answer(name, placement)

    def _answer(self, name: str, placement: Placement | Reservation | str) -> None:
        one = self._waiting.pop(name)
        if not one.answer.done():
            one.answer.set_result(placement)


def _broken(_error: StoreError) -> None:
    """The call that waits on the connection fails, and tells the same."""


def _read(granted: bytes) -> tuple[str, Placement | str]:
    """The seat and the answer of `place`; an empty seat if somebody else wrote it."""
    try:
        name, _waited_ms, reply = orjson.loads(granted)
        placement = parse_placement(_encoded(reply))
    except (ValueError, TypeError, LookupError, AttributeError):
        return "", LOST
    return str(name), placement if isinstance(placement, Placement) else LOST


def _encoded(reply: Any) -> Any:
    """As Redis answers: texts are bytes. The places of a pair are one reply in the other."""
    if isinstance(reply, list):
        return [_encoded(part) for part in reply]
    return reply.encode() if isinstance(reply, str) else reply
