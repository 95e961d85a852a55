"""Second attempts of streams whose first byte is late (hedges): the first to begin answers, the other one is cancelled.
If the first attempt fails, the second one takes its place. If the second one fails, that counts as any failed attempt.

A replica can be slow long before anybody counts it as dead, hung or slow. A placement tells what work is ahead of a
request, so a gateway knows when its first byte is due. If it is late, and so were others of that replica, another one
gets the request, too. If the replica was well until now, it has more time first.

Redis places second attempts, and allows them for a small share of all prompt tokens, over all gateways
(lua/steps/hedge.lua). So if everything is slow, there are few, and if requests wait for room, there are none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final

import structlog

from coordinator.errors import NoRoom, OverBudget, OverLimit, StoreError
from coordinator.pool.hedged import tell
from coordinator.store import Store
from gateway.deadlines import TICK_S, Deadlines
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.beginnings import begins, begun, declined, failure_of
from gateway.relay.elsewhere import Elsewhere
from gateway.relay.lateness import Lateness, predicted_s, tokens_until
from gateway.relay.moves import Moves, WaitingAttempt
from gateway.relay.outgoing import Outgoing
from gateway.relay.retries import HEDGED, Failure
from gateway.relay.second import Second
from gateway.relay.tries import Tries
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.routing.router import Router
from gateway.routing.ticket import Ticket
from gateway.settings.limit_settings import HedgeSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

LATER: Final = "later"
"""Of a second attempt that would not come earlier than the first one has waited."""
_ALONE = 2.0
"""A first byte that is late alone has so many times longer."""
_LEAST_LATE_S = 0.1
"""Nobody gains by less."""
_UNKNOWN, _UNKNOWN_LATE_S = 5.0, 1.0
"""So many times what was predicted is late, and at least this, while a gateway does not know yet what is usual."""
_BUSY_S = 2 * TICK_S
"""If a gateway sees so late that a first byte is due, it was busy itself. The byte may be there."""
_AGAIN = 1.25
"""Then it is thought of again after so many times that."""
_TOLD_EACH_S = 1.0
_log = structlog.get_logger("kvgate.hedges")


class Hedges:
    """The second attempts of one gateway. `run()` is a background task."""

    def __init__(
        self,
        settings: HedgeSettings,
        *,
        store: Store,
        moves: Moves,
        router: Router,
        elsewhere: Elsewhere,
        outgoing: Outgoing,
        upstream: Upstream,
        admission: Admission,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self.use(settings)
        self.router, self.elsewhere, self.outgoing, self.upstream = router, elsewhere, outgoing, upstream
        self.admission, self.metrics, self.tasks = admission, metrics, tasks
        self.deadlines = Deadlines()
        self._store, self._moves = store, moves
        self._lateness: dict[str, Lateness] = {}
        """By pool."""

    def use(self, settings: HedgeSettings) -> None:
        """These hold from now on."""
        self._settings = settings

    def watch(
        self, job: Job, tries: Tries, waiting: WaitingAttempt, failed: Callable[[Tries, Second, Failure], None]
    ) -> Hedge | Unwatched:
        """`with hedges.watch(…) as hedge:` surrounds the wait for the first byte of the last ticket's attempt. `failed`
        is told if a second one fails."""
        ticket, placement = tries.ticket, tries.ticket.placement
        if placement is None or ticket.is_prefilled or not self._settings.max_share:
            return UNWATCHED
        lateness = self._lateness.get(ticket.pool.name)
        if lateness is None:
            lateness = self._lateness[ticket.pool.name] = Lateness()
        lateness.placed_tokens += placement.backlog_tokens
        if not waiting.serving or not _may_hedge(job, tries):
            return UNWATCHED
        due = predicted_s(placement.ahead_tokens, placement.backlog_tokens, _tokens_per_s(ticket))
        return Hedge(self, job, tries, waiting, failed, lateness, due)

    def late_s(self, lateness: Lateness, predicted_s: float) -> float:
        """After how long a first byte is late."""
        if factor := self._settings.late_factor or lateness.usual:
            return max(_LEAST_LATE_S, factor * predicted_s)
        return max(_UNKNOWN_LATE_S, _UNKNOWN * predicted_s)

    async def place(self, job: Job, tries: Tries, lateness: Lateness) -> Ticket:
        """Raises what Router.place_beside raises."""
        first = tries.ticket
        if not await self._moves.answers(first.replica):
            raise NoRoom("silent", 0)  # the prompt may be what keeps its server busy
        waited_s = time.monotonic() - first.sent_s
        most_tokens = tokens_until(waited_s / (lateness.usual or 1.0), _tokens_per_s(first))
        avoided = {*self.elsewhere.avoided(job, tries), *lateness.slow()}
        return await self.router.place_beside(job, first, [*avoided], self._settings.max_share, most_tokens)

    @property
    def is_by_setting(self) -> bool:
        """Whether the configuration says what is late."""
        return self._settings.late_factor is not None

    async def run(self) -> None:
        """Tells Redis of each pool, and hears which replicas are slow, until cancelled."""
        while True:
            await asyncio.sleep(_TOLD_EACH_S)
            for name, lateness in list(self._lateness.items()):
                placed_tokens, first_bytes = lateness.take_told()
                if not placed_tokens and not first_bytes and not lateness.lately:
                    continue  # an idle gateway asks Redis nothing
                with suppress(StoreError):  # what it was not told allows nothing
                    self._heard(lateness, await tell(self._store.pool(name).run, placed_tokens, first_bytes))

    def _heard(self, lateness: Lateness, lately: dict[str, bool]) -> None:
        """Which replicas were late lately, and whether they are slow."""
        for replica in set(lateness.lately).union(lately):
            is_slow, was_slow = lately.get(replica, False), lateness.lately.get(replica, False)
            self.metrics.replica_slow.labels(replica).set(is_slow)
            if is_slow and not was_slow:
                _log.warning("replica slow", replica=replica, hint="its first bytes are late; it gets fewer requests")
            elif was_slow and not is_slow:
                _log.info("replica not slow any more", replica=replica)
        lateness.lately = lately


class Hedge:
    """One wait for a first byte, and the second attempt that begins if it is late."""

    __slots__ = (
        "_failed", "_first", "_hedges", "_is_answered", "_is_late", "_is_over", "_job", "_lateness", "_predicted_s",
        "_second", "_task", "_tries", "_waiting", "due_s",
    )  # fmt: skip

    def __init__(
        self,
        hedges: Hedges,
        job: Job,
        tries: Tries,
        waiting: WaitingAttempt,
        failed: Callable[[Tries, Second, Failure], None],
        lateness: Lateness,
        predicted_s: float,
    ) -> None:
        self._hedges, self._job, self._tries, self._waiting, self._failed = hedges, job, tries, waiting, failed
        self._lateness, self._predicted_s, self._first = lateness, predicted_s, tries.ticket
        self._task: asyncio.Task[None] | None = None
        self._second: Second | None = None
        self._is_late = self._is_answered = self._is_over = False
        self.due_s = 0.0

    def __enter__(self) -> Hedge:
        self.due_s = time.monotonic() + self._hedges.late_s(self._lateness, self._predicted_s)
        self._hedges.deadlines.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """If the first attempt has failed, or its client has left, a second one that was sent stays with the tries."""
        self._hedges.deadlines.remove(self)
        self._is_over = True
        if self._second is None:
            if self._task is not None:
                self._task.cancel()
        elif self._is_answered:
            self._tries.second = None
            self._second.give_back()

    def answered(self, in_a_stream: bool) -> None:
        """The first attempt answers."""
        self._is_answered = True
        if in_a_stream:
            ratio = (time.monotonic() - self._first.sent_s) / self._predicted_s
            self._lateness.observe(self._first.replica, ratio, self._is_late)

    def expire(self) -> None:
        """The first byte is late."""
        now_s, replica = time.monotonic(), self._first.replica
        if now_s - self.due_s > _BUSY_S:
            self.due_s = now_s + TICK_S
            return
        if not self._is_late:
            self._is_late = True
            if not self._lateness.is_late(replica) and not self._hedges.is_by_setting:
                self.due_s = self._first.sent_s + _ALONE * (now_s - self._first.sent_s)
                return
        self._hedges.deadlines.remove(self)
        self._task = self._hedges.tasks.spawn(self._run(), "hedge")

    async def _run(self) -> None:
        outcome = "failed"
        try:
            outcome = await self._place() or await self._begin()
        except asyncio.CancelledError:
            outcome = "lost" if self._second is not None else ""
            raise
        finally:
            if outcome not in ("", LATER):
                self._first.late = outcome
                self._hedges.metrics.hedges.inc(outcome)

    async def _place(self) -> str:
        """Why there is no second attempt, or not yet; empty if there is."""
        try:
            ticket = await self._hedges.place(self._job, self._tries, self._lateness)
        except NoRoom as refusal:
            if refusal.reason == LATER:
                self.due_s = self._first.sent_s + _AGAIN * (time.monotonic() - self._first.sent_s)
                self._hedges.deadlines.add(self)
            return refusal.reason
        except (StoreError, OverLimit, OverBudget):
            return "refused"
        assert self._task is not None
        self._second = self._tries.second = Second(ticket, self._hedges.admission, self._task)
        assert ticket.placement is not None
        self._hedges.metrics.hedged_tokens.inc(by=ticket.placement.backlog_tokens)
        return ""

    async def _begin(self) -> str:
        """Sends the request, and waits until its answer begins. What became of it."""
        second = self._second
        assert second is not None
        try:
            failure = await self._send(second)
        except UpstreamError as error:
            failure = Failure(error.reason)
        if failure is None:
            self._win(second)
            return "won"
        second.failed(failure)
        self._failed(self._tries, second, failure)
        return "failed"

    async def _send(self, second: Second) -> Failure | None:
        """None if its answer has begun. Raises UpstreamError."""
        hedges, job, ticket = self._hedges, self._job, second.ticket
        ticket.sent_s = time.monotonic()
        body, headers = hedges.outgoing.body(job, ticket), hedges.outgoing.headers(job, ticket)
        target = hedges.outgoing.target(job, ticket)
        second.answer = answer = await hedges.upstream.send(job.method, ticket.url, target, headers, body)
        if answer.status != 200 or not answer.is_event_stream:
            return await declined(answer, second.held)
        await begun(job, answer, second.held)
        said = begins(job, answer)
        second.plain_bytes, found = said.plain_bytes, said.unfinished
        return None if found is None else failure_of(found, job) or Failure(found.reason, found.status)

    def _win(self, second: Second) -> None:
        """If the first attempt still waits, it ends now, before another task runs."""
        replica, other, after_s = self._first.replica, second.ticket.replica, time.monotonic() - self._first.sent_s
        second.ticket.hedged, second.ticket.late = replica, "won"
        if not self._is_over:
            self._lateness.observe(replica, after_s / self._predicted_s, self._is_late)
            self._waiting.move(HEDGED)
        _log.info("a late stream began elsewhere", replica=replica, other=other, after_s=round(after_s, 3))


class Unwatched:
    """The wait for a first byte of a request that gets no second attempt."""

    def __enter__(self) -> Unwatched:
        return self

    def __exit__(self, *_: object) -> None: ...

    def answered(self, in_a_stream: bool) -> None: ...


UNWATCHED: Final = Unwatched()


def _tokens_per_s(ticket: Ticket) -> float:
    """How fast its replica computes prompts, as far as anybody knows."""
    return ticket.pool.prefills.tokens_per_s(ticket.replica) or ticket.request.knobs.prefill_tokens_per_s


def _may_hedge(job: Job, tries: Tries) -> bool:
    """Whether the request is a stream that another replica may get as well, and for which predictions mean something:
    not with images, or if the engine computes a whole prompt whatever it has cached. The rest of a broken stream, and a
    request that has failed somewhere, have had their second attempt."""
    of = job.endpoint
    return (
        job.stream
        and of.computes_prompt
        and of.is_generated
        and not of.stores_responses
        and job.reads_cache
        and not job.images
        and not job.is_batch
        and not tries.failures
        and tries.seam is None
        and len(job.route.served.replicas) > 1
        and not job.route.served.decode_only
    )
