"""One pool's shared state, as one gateway uses it.

The way of a request: `place` chooses a replica (see placer.py). `first_token` and `done` give the load back (see
reservations.py). Its claims are confirmed or withdrawn (see claims.py).

Whenever the store may have lost what this gateway has reserved, it states that again. The reassertion raises the epoch,
so the store refuses a `place` that runs later. Claims are not stated again: those that were lost with a connection are
repaired.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf

from coordinator.keys import PoolKeys
from coordinator.placement import PlaceRequest
from coordinator.pool.claims import Claims
from coordinator.pool.demand import Held
from coordinator.pool.link import Link
from coordinator.pool.placer import Placer
from coordinator.pool.prefills import Prefills
from coordinator.pool.replicas import Replicas
from coordinator.pool.reservations import Reservations
from coordinator.pool.seats import RESTATED_S, Connect
from coordinator.redis.time_limit import LoopLag
from coordinator.redis.wire import Wire
from coordinator.registry import PoolState, ReplicaFigures, ReplicaRecord, parse_pool_state, still_known
from coordinator.subset import Subset

BEAT_S = 0.5
"""Between two heartbeats."""
LEASE_MS = 3000
MAX_GAP_MS = 1000


class Pool:
    """The store's client for one pool."""

    on_news: Callable[[], None] | None = None
    """Called when a heartbeat has told something new of the pool's replicas."""

    def __init__(
        self,
        name: str,
        gateway: str,
        budget_s: float,
        namespace: str = "",
        connect: Connect | None = None,
        lag: LoopLag | None = None,
    ) -> None:
        """`connect` opens one more connection, which waits for grants; without it, no request waits for room."""
        self.name, self.gateway, self.does_maintenance = name, gateway, True
        self.state: PoolState | None = None
        """As of the last heartbeat; None before the first."""
        self.figures = ReplicaFigures({}, {})
        """As `read_figures` read them last."""
        self.unreadable: Counter[str] = Counter()
        """Records that could not be read, by key: see repair.py."""
        self.maintenance_lag_s: float | None = None
        """How far maintenance is behind, while this gateway does it: see maintenance/worker.py."""
        self._version = ""
        """Of the state: the next heartbeat tells what has changed since; "" asks for everything."""
        self._stated_s = -inf
        self.held = Held()

        self.link = link = Link(name, gateway, namespace)
        self.clock, self.run, self.tell, self.read = link.clock, link.run, link.tell, link.read
        self.reservations = reservations = Reservations(link)
        self.live, self.load, self.settlements = reservations.live, reservations.load, reservations.settlements
        self.first_token, self.done, self.adopt = reservations.first_token, reservations.done, reservations.adopt
        self.replicas = replicas = Replicas(link, self.settlements)
        self.register, self.change_state, self.report = replicas.register, replicas.change_state, replicas.report
        self.claims = Claims(link)
        self.placer = placer = Placer(
            link,
            replicas,
            reservations,
            self.claims,
            budget_s=budget_s,
            lag=lag or LoopLag(),
            connect=connect,
            reassert=self.reassert,
        )
        self.place, self.explain = placer.place, placer.explain
        self.seats, self.subsets = placer.seats, placer.subsets
        self.prefills = Prefills(link, reservations)

    def __repr__(self) -> str:
        return f"<Pool {self.name}, epoch {self.link.epoch}, {self.reservations!r}, {self.placer!r}>"

    @property
    def keys(self) -> PoolKeys:
        return self.link.keys

    @property
    def records(self) -> dict[str, ReplicaRecord]:
        """Every replica known to this gateway."""
        return self.replicas.records

    @property
    def is_worker(self) -> bool:
        """Whether this gateway does the pool's maintenance, as of the last heartbeat."""
        return self.state is not None and self.state.worker == self.gateway

    @property
    def gateways(self) -> int:
        """How many gateways share the replicas, as of the last heartbeat; 1 before the first."""
        return self.state.gateways if self.state is not None else 1

    @property
    def waiting(self) -> int:
        """The requests of this gateway that wait for room."""
        return len(self.seats) + self.load.waiting

    def restated_in_s(self) -> float:
        """How long it takes until all gateways have stated their load to a store that may have lost it."""
        return max(0.0, self._stated_s + RESTATED_S - time.monotonic())

    def attach(self, wire: Wire, is_in_cluster: bool = False) -> None:
        """Use a new connection: everything this gateway knows is stated again on it before anything else."""
        self.link.attach(wire, is_in_cluster)
        self._version = ""  # it may lead to another server, which lacks the last writes
        self.reassert()
        self.claims.repair()

    def detach(self) -> None:
        """The connection is gone: calls fail at once with StoreDown."""
        self.link.wire = None
        self.placer.lost()

    def reassert(self, *, keeps: bool = True) -> None:
        """Raise the epoch and state replicas and live reservations again. Sent at once; calls may follow behind it.
        Unless it `keeps` them, places on their way and seats are dropped, too."""
        kept = self.placer.kept() if keeps else []
        live = self.reservations.all_stated()
        self.subsets.forget()
        self.replicas.restate()
        self.link.epoch += 1
        self._stated_s = time.monotonic()
        where = {"gateway": self.gateway, "epoch": self.link.epoch, "lease_ms": LEASE_MS, "is_all": True}
        self.link.restate("reassert", **where, kept=kept, spent=(), live=live)
        self.reservations.restate_spending(kept)
        self.settlements.room()
        self.seats.attached()

    def replicas_changed(self, serving_now: Callable[[PlaceRequest], Subset | None]) -> None:
        """`serving_now` tells the replicas that may serve a request that waits; None if that is not known."""
        if self.seats.follow(self.subsets, serving_now):
            self.settlements.room()

    async def leave(self) -> None:
        """Deregister, when nothing is live any more. Raises StoreError."""
        self.reassert(keeps=False)
        await self.beat(leaving=True)

    async def beat(self, leaving: bool = False) -> PoolState:
        """Renew the lease and learn the pool's state; reassert if the store does not know this gateway any more."""
        self.reservations.count_adopted(is_beat=True)
        link, epoch, sent_s = self.link, self.link.epoch, time.monotonic()
        reply = await link.run(
            "beat",
            gateway=self.gateway,
            epoch=epoch,
            lease_ms=LEASE_MS,
            max_gap_ms=MAX_GAP_MS,
            leaving=leaving,
            does_maintenance=self.does_maintenance,
            version=self._version,
            held=self.held.text,
            has_written=self.replicas.take_written(),
        )
        state = parse_pool_state(reply, self.state)
        link.clock.heard(state.now_ms, sent_s, link.wire.write_lag_s if link.wire is not None else 0.0)
        if self.state is not None and (not state.known or self.restated_in_s()):
            state = replace(state, gateways=max(state.gateways, self.state.gateways))  # some have not come back yet
        if not state.known and epoch == link.epoch and not leaving:
            self.reassert()
        elif not leaving:
            self.replicas.records = still_known(self.records, self.state, state)
        has_news = state.version != self._version
        self.state, self._version = state, state.version
        self._use(state, leaving)
        if has_news and self.on_news is not None:
            self.on_news()
        return state

    def _use(self, state: PoolState, leaving: bool) -> None:
        """Each part learns what a heartbeat told."""
        if state.has_waiting and not leaving:
            self.settlements.room()  # some appears by time alone
        self.seats.use_subsets(self.subsets)
        self.seats.check()
        self.claims.withdraw_unconfirmed(state)
        self.prefills.end_finished_backlogs(state)

    async def read_figures(self) -> None:
        """Read the replicas' figures for the metrics. Raises StoreError."""
        k = self.keys
        active, engines = await asyncio.gather(self.read("HGETALL", k.active), self.read("HGETALL", k.engines))
        self.figures = ReplicaFigures.parse(active, engines)
