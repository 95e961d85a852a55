"""One life of an engine: its events worked in, in order, and what they mean said to the map.

Everything runs in one loop: take what came, learn the chains of the sessions in it, apply it, publish what changed.
While Redis is away the engine's state goes on being followed; when it is back, all that holds is said again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from coordinator.agent.event_intake import EventIntake
from coordinator.agent.feed import Item, Lost, Received
from coordinator.agent.handover import APPLIED_POLL_S, APPLIED_POLLS, Handover, NotApplied
from coordinator.agent.http_engine import EngineAway, EngineProbe, EngineSnapshot
from coordinator.agent.link import Attended, Fenced, Link, Vitals
from coordinator.agent.lookups import Lookups
from coordinator.agent.registration import Registration
from coordinator.agent.residency import Residency, Transition
from coordinator.agent.tier import Tier
from coordinator.errors import StoreError
from coordinator.redis.outage import Outage

_log = structlog.get_logger("kvgate.agent")

BEAT_S = 0.5


class SessionOver(Exception):
    """The engine lives another life now."""


class EngineSession:
    """Follows one engine life until it is over. `run` raises LifeOver or Fenced."""

    def __init__(self, registration: Registration, replica: str, sight: EngineSnapshot, engine: EngineProbe) -> None:
        self.seq = -1
        """The last engine batch that was worked in."""
        self.residency = Residency()
        self.link: Link | None = None
        self._registration = registration
        self._replica = replica
        self._sight = sight
        self._engine = engine
        self._hearing = EventIntake(replica, sight.events, sight.replay)
        self._pending: list[Transition] = []
        self._oldest_s = 0.0
        self._outage = Outage()
        self._must_restate = True
        self._inheritance: Handover | None = None
        self._has_taken_over = False
        """Whether what the last agent knew is known here, or is void."""
        self._is_complete = True
        self._was_deaf = False
        self._lookups = Lookups()
        self._tier = Tier(replica, self.residency.table)
        self.residency.expect(sight.block_size, sight.capacity_tokens, sight.version)
        self._tier.look(sight.tier, sight.counters)

    async def run(self) -> None:
        """Take the replica over, then follow its events; ends with LifeOver or Fenced, or by cancellation."""
        ended: SessionOver | Fenced | None = None
        try:
            await self._take_over()
            async with asyncio.TaskGroup() as tasks:
                if self._sight.events:
                    tasks.create_task(self._hearing.listen())
                tasks.create_task(self._work())
                tasks.create_task(self._watch())
                tasks.create_task(self._learn_sizes())
        except* (SessionOver, Fenced) as group:
            ended = _first(group)
        finally:
            await self._leave()
        if ended is not None:
            raise ended  # Python before 3.11.4 wraps what is raised within `except*` in a group

    async def _leave(self) -> None:
        """Let go of the replica, for the next agent to find what this one knew."""
        if self.link is not None:
            try:
                await self.link.attend(self._vitals(), leaving=True)
            except (StoreError, Fenced):
                _log.info("could not say goodbye", replica=self._replica)
            await self._close_link()

    # -- in ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Beside the events: an engine that is slow to answer must not hold them up."""
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
            items = await self._hearing.collect(beat_at)
            try:
                await self._learn_chains(items)
            except StoreError as error:
                await self._lost_link(error)
            self._apply(items)
            await self._flush()  # before a beat says that these batches are worked in
            if loop.time() >= beat_at:
                beat_at = loop.time() + BEAT_S
                await self._beat()
                await self._flush()

    async def _learn_chains(self, items: Iterable[Item]) -> None:
        """Ask for the chains of the sessions that these events name, before what they tell is worked in."""
        if self.link is None:
            return
        due = self._lookups.due(items, self.residency, time.monotonic())
        await self._bind(due)

    async def _bind(self, sessions: list[str]) -> None:
        assert self.link is not None
        may_report = self._lookups.may_report(self.residency, time.monotonic())
        for binding in await self.link.bindings(sessions, may_report) if sessions else ():
            self._say(self.residency.bind(binding), time.time())

    def _apply(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, Received):
                changes = self.residency.apply(item.batch.events)
                self._tier.apply(item.batch.events)
                self._say(changes, item.batch.ts)
                self.seq = item.seq
            elif isinstance(item, Lost):
                self._lose(item)
                self.seq = item.next_seq - 1
            else:
                _log.info("engine restarted", replica=self._replica)
                self.seq = -1
                self._disinherit()
                self._say(self.residency.reset(relearn=False), time.time())
            self._inherit()

    def _lose(self, lost: Lost) -> None:
        _log.warning("events lost", replica=self._replica, first=lost.first_seq, next=lost.next_seq)
        self._is_complete = False
        if self._inheritance is not None and lost.next_seq - 1 <= self._inheritance.seq:
            self.residency.relearn()  # the last agent had them: what it said still holds
            return
        self._disinherit()
        self._say(self.residency.reset(relearn=True), time.time())

    # -- out ---------------------------------------------------------------------------------------------------

    def _say(self, transitions: list[Transition], happened_s: float) -> None:
        self._tier.note(transitions)
        if transitions and not self._must_restate:
            if not self._pending:
                self._oldest_s = happened_s
            self._pending += transitions

    async def _flush(self) -> None:
        """Publish what changed, or everything where the map may have missed something."""
        if self.link is None or self._inheritance is not None:
            return
        try:
            if self._must_restate:
                await self.link.restate(list(self.residency.residents()), self.seq)
                self._must_restate = False
            elif self._pending:
                batch, self._pending = self._pending, []
                await self.link.publish(batch, max(0.0, time.time() - self._oldest_s), self.seq)
            await self._tier.publish(self.link)
        except StoreError as error:
            await self._lost_link(error)

    async def _beat(self) -> None:
        """Renew the lease, take what was asked and measured."""
        if not await self._reach():
            return
        assert self.link is not None
        vitals = self._vitals()
        if self._was_deaf and vitals.mode != "none":
            self._must_restate = True  # while nothing was heard, its keys were trimmed as claims are
        self._was_deaf = vitals.mode == "none"
        try:
            answer = await self.link.attend(vitals)
            if not isinstance(answer, Attended):
                raise Fenced("another agent holds the replica")
            await self._heed(answer)
            await self._tier.report(self.link)
        except StoreError as error:
            await self._lost_link(error)
            return
        self._inherit()

    async def _heed(self, answer: Attended) -> None:
        """Do what was asked, and take what was measured: of requests whose events are still to come, too."""
        assert self.link is not None
        if answer.before is None or answer.had_lapsed or answer.asked == "restate":
            self._must_restate = True
        # Where other groups of blocks decide as well, a prefix may be a miss although all that is told of is there.
        if answer.asked == "reset" and not self.residency.table.is_hybrid:
            _log.warning("told that the engine lacks what its events promised", replica=self._replica)
            self._disinherit()
            self._say(self.residency.reset(relearn=True), time.time())
        await self._bind([said.tip for said in answer.measured if not self.residency.is_bound(said.tip)])
        for said in answer.measured:
            self._say(self.residency.measure(said.tip, said.prompt_tokens, said.token_ids), time.time())

    async def _look(self) -> None:
        try:
            sight = await self._engine.look()
        except EngineAway:
            return  # its life is over when another one is seen
        if (sight.started, sight.pool, sight.events) != (self._sight.started, self._sight.pool, self._sight.events):
            raise SessionOver
        self._sight = sight
        self._tier.look(sight.tier, sight.counters)

    def _vitals(self) -> Vitals:
        mode = "session" if self.residency.echoes_sessions else "token_ids"
        mode = mode if self._sight.events and self._hearing.hears() else "none"
        seq = self.seq if self._has_taken_over and not self._must_restate else None
        return Vitals(mode, self.residency.is_relearning, self._sight.waiting, seq, self._sight.counters)

    # -- the link ----------------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Connect, wait until no other agent holds the replica, and find what the last one knew."""
        held_by_other, polls_left = False, APPLIED_POLLS
        while not self._has_taken_over and self._inheritance is None:
            wait_s = BEAT_S
            try:
                if await self._reach():
                    assert self.link is not None
                    answer = await self.link.attend(self._vitals())
                    if isinstance(answer, Attended):
                        await self._heed(answer)
                        self._inheritance = await Handover.find(self.link, answer, polls_left > 0)
                        self._has_taken_over |= self._inheritance is None
                        continue
                    if not held_by_other:
                        held_by_other = True
                        _log.info("waiting: another agent holds this replica", replica=self._replica)
                    wait_s = min(answer, BEAT_S)
            except NotApplied:
                wait_s, polls_left = APPLIED_POLL_S, polls_left - 1
            except StoreError as error:
                await self._lost_link(error)
            await asyncio.sleep(wait_s)
            await self._look()

    async def _reach(self) -> bool:
        """Connect and register where that is not done; False where it cannot be."""
        if self.link is not None:
            if (away_s := self._outage.ended(time.monotonic())) is not None:  # a link that lasts a heartbeat serves
                _log.info("store back", replica=self._replica, away_s=away_s)
            return True
        try:
            self.link = await self._registration.open(self._sight)
        except StoreError as error:
            await self._lost_link(error)
            return False
        self._must_restate = True
        self._lookups.forget()
        self._tier.forget()
        return True

    async def _lost_link(self, error: StoreError) -> None:
        if (away_s := self._outage.failed(time.monotonic())) is not None:
            _log.warning("store away", replica=self._replica, reason=str(error), away_s=away_s)
        self._must_restate = True
        self._pending.clear()
        await self._close_link()

    async def _close_link(self) -> None:
        if self.link is not None:
            link, self.link = self.link, None
            await link.close()

    def _inherit(self) -> None:
        if self._inheritance is not None and self._inheritance.is_due(self.seq):
            self._inheritance.pass_on(self.residency, self.seq, self._is_complete)
            self._disinherit()

    def _disinherit(self) -> None:
        self._inheritance, self._has_taken_over = None, True


def _first(group: BaseExceptionGroup[SessionOver | Fenced]) -> SessionOver | Fenced:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
