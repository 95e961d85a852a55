"""Follows one engine process: applies its events in order, and publishes what changed.

One loop does this in turn: it collects events, reads the chains of the sessions that they name, applies the events, and
publishes the changes. While Redis is away, the loop still follows the engine. When Redis is back, the agent
publishes everything that its replica holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf

import structlog

from coordinator.agent.agent_store import AgentStore, Attended, Fenced, Registration, Vitals
from coordinator.agent.batch_sequence import Item, Lost, Received
from coordinator.agent.event_delay import EventDelay
from coordinator.agent.feed import Feed
from coordinator.agent.http_engine import EngineAway, EngineProbe, EngineSnapshot
from coordinator.agent.kv_events import Stored
from coordinator.agent.residency import Residency, Resident, Transition
from coordinator.agent.restatement import Restatement
from coordinator.agent.tier_reporter import TierReporter
from coordinator.errors import StoreError
from coordinator.redis.outage import Outage
from coordinator.registry import ASLEEP, PARTIAL, SESSION, UNCONFIRMED

_log = structlog.get_logger("kvgate.agent")

BEAT_S = 0.5

_GATHER_S = 0.02
"""Events are gathered for this time before they are applied and published; longer if the last ones were published a
moment ago and the fleet is large."""
_APART_S_AN_AGENT = 0.00025
"""All agents together publish at most 4000 times a second."""
_MAX_APART_S = 0.25
"""Half of the time in which an event should reach the map. Claims are withdrawn after claims.CONFIRM_S (2 s)."""
_QUEUE = 1000
_SILENCE_S = 15.0

_OVERDUE_S = 5.0

_REPORTS_S = 10.0
"""For this time after relearning, the engine may still report blocks as it was asked to."""


def publish_at_s(now_s: float, last_s: float, agents: int) -> float:
    """When an agent publishes what happens now, if it has last published at `last_s`, in a pool with so many agents."""
    return max(now_s + _GATHER_S, last_s + min(_APART_S_AN_AGENT * agents, _MAX_APART_S))


def mode_of(residency: Residency) -> str:
    """What the events tell, as in lua/attend.lua."""
    if not (residency.names_sessions and residency.table.tells_prefixes):
        return UNCONFIRMED
    return PARTIAL if residency.table.is_hybrid else SESSION


class SessionOver(Exception):
    """Another engine process runs at the replica's address, or it serves another model or publishes elsewhere."""


class EngineSession:
    """Follows one engine process until it is over."""

    def __init__(self, registration: Registration, replica: str, snapshot: EngineSnapshot, engine: EngineProbe) -> None:
        self.seq = -1
        """The last engine batch that was applied."""
        self.residency = Residency()
        self.store: AgentStore | None = None
        """None while Redis cannot be reached."""
        self._registration = registration
        self._replica = replica
        self._snapshot = snapshot
        self._engine = engine
        self._intake = EventIntake(replica, snapshot.events, snapshot.replay)
        self._pending: list[Transition] = []
        self._oldest_s = 0.0
        self._outage = Outage()
        self._delay = EventDelay()
        self._restatement: Restatement | None = None
        """The one that is under way. Until it ends, the map may lack something."""
        self._restating = 1
        """How many agents of the pool say everything again."""
        self._state = ""
        """The replica's state in the registry, as of the last heartbeat."""
        self._handover: Handover | None = None
        self._has_taken_over = False
        """Whether the last agent's knowledge was taken over, or is void."""
        self._is_complete = True
        """Whether the events tell everything that the engine stored since it started."""
        self._was_silent = False
        self._lookups = ChainLookups()
        self._tiers = TierReporter(replica, self.residency.table)
        self.residency.expect(snapshot.block_size, snapshot.capacity_tokens, snapshot.version)
        self.residency.table.now_s = time.time()
        self._tiers.observe(snapshot.tier, snapshot.counters)
        self._restate()

    async def run(self) -> None:
        """Take the replica over, then follow its events. Ends with SessionOver or Fenced, or by cancellation."""
        ended: SessionOver | Fenced | None = None
        try:
            await self._take_over()
            async with asyncio.TaskGroup() as tasks:
                if self._snapshot.events:
                    tasks.create_task(self._intake.listen())
                tasks.create_task(self._work())
                tasks.create_task(self._watch())
                tasks.create_task(self._learn_sizes())
        except* (SessionOver, Fenced) as group:
            ended = _first(group)
        finally:
            await self._leave()
        if ended is not None:
            raise ended  # Python before 3.11.4 wraps an exception that is raised within `except*` in a group

    async def _leave(self) -> None:
        """Give the lease up; the last batch number stays in the store, from which the next agent continues."""
        if self.store is not None:
            try:
                await self.store.attend(self._vitals(), leaving=True)
            except (StoreError, Fenced):
                _log.info("could not give the lease back", replica=self._replica)
            await self._close_store()

    # -- in ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """A task of its own: an engine that answers slowly must not hold up its events."""
        while True:
            await self._look()
            await asyncio.sleep(BEAT_S)

    async def _learn_sizes(self) -> None:
        while True:
            await self.residency.table.sizes.learn(self._engine.detokenize)
            await asyncio.sleep(BEAT_S)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        beat_at = loop.time()
        while True:
            items = await self._intake.collect(min(beat_at, self._piece_due_s()))
            try:
                await self._learn_chains(items)
            except StoreError as error:
                await self._store_lost(error)
            self._apply(items)
            await self._flush()  # before a heartbeat tells that these batches are applied
            if loop.time() >= beat_at:
                beat_at = loop.time() + BEAT_S
                await self._beat()
                await self._flush()

    async def _learn_chains(self, items: Iterable[Item]) -> None:
        """Read the chains of the sessions that these events name, before the events are applied."""
        if self.store is not None:
            await self._bind(self.store, self._lookups.due(items, self.residency))

    async def _bind(self, store: AgentStore, sessions: list[str]) -> None:
        may_report = self._lookups.may_report(self.residency, time.monotonic())
        for binding in await store.bindings(sessions, may_report) if sessions else ():
            self._queue(self.residency.bind(binding), time.time())

    def _apply(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, Received):
                changes = self.residency.apply(item.batch.events, item.batch.ts)
                self._tiers.apply(item.batch.events)
                self._queue(changes, item.batch.ts)
                self.seq = item.seq
            elif isinstance(item, Lost):
                self._lose(item)
                self.seq = item.next_seq - 1
            else:
                _log.info("engine restarted", replica=self._replica)
                self.seq = -1
                self._drop_handover()
                self._queue(self.residency.reset(relearn=False), time.time())
            self._accept_handover()

    def _lose(self, lost: Lost) -> None:
        _log.warning("events lost", replica=self._replica, first=lost.first_seq, next=lost.next_seq)
        self._is_complete = False
        if self._handover is not None and lost.next_seq - 1 <= self._handover.seq:
            self.residency.relearn()  # the last agent had these events, so its keys still hold
            return
        self._drop_handover()
        self._queue(self.residency.reset(relearn=True), time.time())

    # -- out ---------------------------------------------------------------------------------------------------

    def _queue(self, transitions: list[Transition], happened_s: float) -> None:
        self._tiers.note(transitions)
        if transitions and self._published_to() is not None:  # else they are said again
            if not self._pending:
                self._oldest_s = happened_s
            self._pending += transitions

    def _restate(self) -> None:
        """The map may have missed something: everything that the replica holds is to be published again."""
        self._restatement = Restatement(self.residency, asyncio.get_running_loop().time(), self._intake.agents)
        self._pending.clear()

    def _published_to(self) -> AgentStore | None:
        """Where changes are published; None while Redis is away, or the last agent's knowledge is not taken over."""
        return self.store if self._handover is None else None

    def _piece_due_s(self) -> float:
        """When to go on with the restatement (event loop time)."""
        return self._restatement.due_s if self._restatement is not None and self._published_to() is not None else inf

    async def _flush(self) -> None:
        """Publish what changed, and a piece of everything if the map may have missed something."""
        store = self._published_to()
        if store is None:
            return
        try:
            await self._tiers.publish(store)  # first: who sees that a prompt is held looks for its chunks' names
            if self._pending:
                await self._publish_pending(store)
            now_s, again = asyncio.get_running_loop().time(), self._restatement
            if again is not None and now_s >= again.due_s:
                is_over = await again.publish_piece(store, self.seq, now_s, self._restating)
                if is_over and self._restatement is again:
                    self._restatement = None
        except StoreError as error:
            await self._store_lost(error)

    async def _publish_pending(self, store: AgentStore) -> None:
        batch, self._pending = self._pending, []
        oldest_s = self._oldest_s
        seq = self.seq if self._restatement is None else None
        await store.publish(batch, max(0.0, time.time() - oldest_s), seq)
        delay_s = time.time() - oldest_s if self._restatement is None else 0.0  # else these may be replayed events
        self._delay.note(max(0.0, delay_s), len(batch), asyncio.get_running_loop().time())

    async def _beat(self) -> None:
        """Renew the lease, and handle the answer."""
        store = await self._reach()
        if store is None:
            return
        vitals = self._vitals()
        if self._was_silent and vitals.mode != "none":
            self._restate()  # while no event came, the replica's keys were trimmed as claims are
        self._was_silent = vitals.mode == "none"
        try:
            answer = await store.attend(vitals)
            if not isinstance(answer, Attended):
                raise Fenced("another agent holds the replica")
            await self._handle(store, answer)
            await self._tiers.report(store)
        except StoreError as error:
            await self._store_lost(error)
            return
        self._accept_handover()

    async def _handle(self, store: AgentStore, answer: Attended) -> None:
        """Do what the gateways asked for, and take in the prompts that they measured, before or after their events."""
        self._intake.agents, self._restating = answer.agents, answer.restating
        self._state = answer.state
        if self._snapshot.is_asleep is not None and (answer.state == ASLEEP) != self._snapshot.is_asleep:
            await self._tell_sleep(store)
        if answer.before is None or answer.had_lapsed or answer.asked == "restate":
            self._restate()
        if answer.asked == "reset":
            message = "a gateway found that the engine lacks blocks that its events announced"
            _log.warning(message, replica=self._replica)
            self._drop_handover()
            self._queue(self.residency.reset(relearn=True), time.time())
        await self._bind(store, [each.tip for each in answer.measured if not self.residency.is_bound(each.tip)])
        for each in answer.measured:
            self._queue(self.residency.measure(each.tip, each.prompt_tokens), time.time())
        self._queue(self.residency.void(answer.voided), time.time())

    async def _look(self) -> None:
        try:
            seen = await self._engine.look()
        except EngineAway:
            return  # the session ends when another process is seen
        known = self._snapshot
        if (seen.started, seen.pool, seen.events) != (known.started, known.pool, known.events):
            raise SessionOver
        self._snapshot = seen
        self._tiers.observe(seen.tier, seen.counters)
        if seen.is_asleep is not None and seen.is_asleep != bool(known.is_asleep):
            await self._sleep_changed()

    async def _sleep_changed(self) -> None:
        """An engine that falls asleep clears its cache, and tells so with its next step, after it has woken up. If it
        was only paused, it may have kept its blocks: then they are learned again."""
        if self._snapshot.is_asleep:
            self._drop_handover()
            self._queue(self.residency.reset(relearn=True), time.time())
        if self.store is not None:
            try:
                await self._tell_sleep(self.store)
            except StoreError:
                _log.info("could not tell whether it sleeps", replica=self._replica)  # the next heartbeat tells it

    async def _tell_sleep(self, store: AgentStore) -> None:
        """Say in the registry whether the engine sleeps. Whether a replica is dead is for its gateways to say."""
        if self._state in ("", "dead"):
            return
        before, self._state = self._state, ASLEEP if self._snapshot.is_asleep else "ready"
        _log.info("asleep" if self._snapshot.is_asleep else "awake", replica=self._replica)
        await store.change_state(before, self._state)

    def _vitals(self) -> Vitals:
        is_receiving = bool(self._snapshot.events) and self._intake.is_receiving()
        seq = self.seq if self._has_taken_over and self._restatement is None else None
        now_s = asyncio.get_running_loop().time()
        untold_s = now_s - self._restatement.since_s if self._restatement is not None else 0.0
        return Vitals(
            mode=mode_of(self.residency) if is_receiving else "none",
            is_relearning=self.residency.is_relearning,
            waiting=self._snapshot.waiting,
            seq=seq,
            counters=self._snapshot.counters | self._delay.figures(now_s, untold_s),
            is_restating=self._restatement is not None,
            held_tokens=self.residency.held_tokens,
        )

    # -- the store ---------------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Connect, wait until no other agent holds the replica, and read what the last agent knew."""
        held_by_other = False
        while not self._has_taken_over and self._handover is None:
            wait_s = BEAT_S
            try:
                if (store := await self._reach()) is not None:
                    answer = await store.attend(self._vitals())
                    if isinstance(answer, Attended):
                        await self._handle(store, answer)
                        self._handover = await Handover.find(store, answer)
                        self._has_taken_over |= self._handover is None
                        continue
                    if not held_by_other:
                        held_by_other = True
                        _log.info("waiting: another agent holds this replica", replica=self._replica)
                    wait_s = min(answer, BEAT_S)
            except StoreError as error:
                await self._store_lost(error)
            await asyncio.sleep(wait_s)
            await self._look()

    async def _reach(self) -> AgentStore | None:
        """The store, connected and registered; None if that fails."""
        if self.store is not None:
            if (away_s := self._outage.ended(time.monotonic())) is not None:  # the connection lasted one heartbeat
                _log.info("store back", replica=self._replica, away_s=away_s)
            return self.store
        try:
            self.store = await self._registration.open(self._snapshot)
        except StoreError as error:
            await self._store_lost(error)
            return None
        self._restate()
        self._tiers.forget()
        return self.store

    async def _store_lost(self, error: StoreError) -> None:
        if (away_s := self._outage.failed(time.monotonic())) is not None:
            _log.warning("store away", replica=self._replica, reason=str(error), away_s=away_s)
        self._restate()
        await self._close_store()

    async def _close_store(self) -> None:
        if self.store is not None:
            store, self.store = self.store, None
            await store.close()

    # -- the last agent ----------------------------------------------------------------------------------------

    def _accept_handover(self) -> None:
        if self._handover is not None and self._handover.is_due(self.seq):
            self._handover.apply_to(self.residency, self.seq, self._is_complete)
            self._drop_handover()

    def _drop_handover(self) -> None:
        self._handover, self._has_taken_over = None, True


class EventIntake:
    """Gathers the events of one engine, and knows whether any arrive. Run `listen` as a task. An empty `replay` means
    that the engine replays nothing."""

    def __init__(self, replica: str, events: str, replay: str) -> None:
        self._replica = replica
        self._events = events
        self._replay = replay
        self.agents = 1
        """How many agents the pool has."""
        self._collected_at_s = -inf
        self._items: asyncio.Queue[Item] = asyncio.Queue(_QUEUE)
        self._feed: Feed | None = None
        self._was_receiving = False

    async def listen(self) -> None:
        """Runs until cancelled; raises zmq.ZMQError for endpoints that no socket can connect to."""
        self._feed = Feed(self._events, self._replay or None)
        async with aclosing(self._feed.items()) as items:
            async for item in items:
                await self._items.put(item)

    async def collect(self, until_s: float) -> list[Item]:
        """The next items, gathered for a moment; empty if nothing comes until `until_s` (event loop time)."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until_s):
                items = [await self._items.get()]
        except TimeoutError:
            return []
        now_s = loop.time()
        await asyncio.sleep(max(0.0, min(publish_at_s(now_s, self._collected_at_s, self.agents), until_s) - now_s))
        while not self._items.empty():
            items.append(self._items.get_nowait())
        self._collected_at_s = loop.time()
        return items

    def is_receiving(self) -> bool:
        """Whether events reach this agent. A quiet engine with a replay endpoint is asked for events every second, so
        its silence is noticed; an engine without one is believed."""
        heard_s = self._feed.heard_s if self._feed is not None else None
        receives = not self._replay or (heard_s is not None and time.monotonic() - heard_s < _SILENCE_S)
        if receives != self._was_receiving:
            self._was_receiving = receives
            log = _log.info if receives else _log.warning
            log("events" if receives else "no events", replica=self._replica, endpoint=self._events)
        return receives


class ChainLookups:
    """Decides which sessions' chains to read from the store. Pure."""

    def __init__(self) -> None:
        self._relearning_at_s: float | None = None

    def due(self, items: Iterable[Item], residency: Residency) -> list[str]:
        """The sessions named in these events whose chains are to be read now: those that are not known yet, because a
        gateway may write one late. While relearning, known chains are read again: the chain's record tells whether its
        request was asked to report."""
        named = {
            event.session
            for item in items
            if isinstance(item, Received)
            for event in item.batch.events
            if isinstance(event, Stored) and event.session
        }
        return [name for name in named if residency.is_relearning or not residency.is_bound(name)]

    def may_report(self, residency: Residency, now_s: float) -> bool:
        """Whether the engine may be reporting blocks that it reuses. A new agent does not know whether the last one was
        relearning, so it assumes that."""
        if residency.is_relearning or self._relearning_at_s is None:
            self._relearning_at_s = now_s
        return now_s - self._relearning_at_s < _REPORTS_S


@dataclass(frozen=True, slots=True)
class Handover:
    """What the last agent of a replica knew: the keys that were resident after engine batch `seq` was applied."""

    seq: int
    residents: Sequence[Resident]
    overdue_at_s: float
    """When to stop waiting for the events to reach `seq` (monotonic time)."""

    @classmethod
    async def find(cls, store: AgentStore, answer: Attended) -> Handover | None:
        """None if no agent followed this process before. Raises StoreError."""
        before = answer.before
        if before is None or before.incarnation != store.incarnation or before.seq < 0:
            return None
        return cls(before.seq, await store.residents(), time.monotonic() + _OVERDUE_S)

    def is_due(self, seq: int) -> bool:
        """Whether the events have reached the last agent's batch, or will not."""
        return seq >= self.seq or time.monotonic() > self.overdue_at_s

    def apply_to(self, residency: Residency, seq: int, is_complete: bool) -> None:
        """Assume the keys; if the events tell the engine's whole history, only those that they confirm."""
        for resident in self.residents:
            residency.assume(resident, is_complete and seq >= self.seq)


def _first(group: BaseExceptionGroup[SessionOver | Fenced]) -> SessionOver | Fenced:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
