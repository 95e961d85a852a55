"""Decides whether a request whose attempt failed is sent to another replica."""

from __future__ import annotations

import time
from collections.abc import Collection
from math import inf

from gateway.metrics.gateway_metrics import Metrics
from gateway.relay.endings import ABORTED
from gateway.relay.moves import Moves
from gateway.relay.own_refusals import NOT_FOUND, REFUSALS, own_refusal
from gateway.relay.retries import (
    NO_PREFILL,
    SWITCHED,
    ends_attempts,
    has_stalled_two,
    is_refusal,
    maybe_executed,
)
from gateway.relay.retry_budget import RetryBudget
from gateway.relay.tries import Tries
from gateway.replicas.fleet import Fleet
from gateway.request.job import Job
from gateway.routing.failures import ReplicaFailures
from gateway.settings.limit_settings import RetrySettings
from gateway.upstream import Answer

_ENDING_BY_THEMSELVES = frozenset({"refused", "unreachable", ABORTED, SWITCHED, NO_PREFILL})


class Elsewhere:
    """The retries of one gateway."""

    def __init__(
        self, retries: RetrySettings, fleet: Fleet, failures: ReplicaFailures, moves: Moves, metrics: Metrics
    ) -> None:
        self.use(retries)
        self._budget = RetryBudget()
        self._fleet = fleet
        self._failures = failures
        self._moves = moves
        self._metrics = metrics

    def use(self, retries: RetrySettings) -> None:
        """These hold from now on, for requests that run, too."""
        self._max_attempts = retries.max_attempts

    def note_request(self) -> None:
        """A client's request has come: the budget of retries is a share of these."""
        self._budget.note_request(time.monotonic())

    def is_next(self, job: Job, tries: Tries) -> bool:
        """Whether to ask another replica. Others may have come since the request was read."""
        job.route.renew(self._fleet)
        tried, failures, replica = set(tries.replicas), tries.failures, tries.ticket.replica
        if (
            tried.issuperset(job.route.could_serve())
            or len(failures) >= self._max_attempts
            or ends_attempts(failures, job.has_effects)
        ):
            return False
        if failures[-1].reason in _ENDING_BY_THEMSELVES or is_refusal(failures[-1]):
            return True  # placements soon avoid such a replica, so these retries end by themselves
        if not self._fleet.is_ready(replica):
            return True
        # The breaker of a replica that fails everybody opens soon.
        fails_everybody = self._failures.errs_in_a_row(replica) and self._has_sound_one(job, tried)
        if self._budget.take(time.monotonic(), may_exceed=fails_everybody):
            return True
        self._metrics.retries_withheld.inc()
        return False

    def may_fall_back(self, job: Job, tries: Tries) -> bool:
        """Whether another model may get a request that replicas of its own have failed. That is a retry. But if none of
        these is sound, the budget would only keep clients from the model that is to answer then."""
        failures = tries.failures
        if not failures:
            return True
        if has_stalled_two(failures) or (job.has_effects and maybe_executed(failures) is not None):
            return False
        return self._budget.take(time.monotonic(), may_exceed=not self._has_sound_one(job, ()))

    def _has_sound_one(self, job: Job, tried: Collection[str]) -> bool:
        """Whether a ready replica is left that does not answer each request with an error. If all do, retries would
        only add to the load."""
        left = (name for name in job.route.could_serve() if name not in tried)
        return any(self._fleet.is_ready(name) and not self._failures.errs_in_a_row(name) for name in left)

    def avoided(self, job: Job, tries: Tries) -> list[str]:
        """The replicas not to ask: those that were asked, also for a prefill in vain, those that this gateway cannot
        reach, and the one that broke its stream off if there is another one."""
        route = job.route
        lost = () if route.pinned else self._moves.unreachable(route.served.replicas, route.served.pool)
        asked = [*tries.replicas, *tries.failed_prefills, *lost]
        if tries.left and any(self._fleet.is_ready(name) for name in set(route.could_serve()) - {tries.left, *asked}):
            return [*asked, tries.left]
        return asked

    def others(self, job: Job, tries: Tries) -> Collection[str]:
        """The replicas that may be asked if this attempt fails. A request with effects stays where it is."""
        is_last = job.route.pinned or job.has_effects or len(tries.failures) + 1 >= self._max_attempts
        return () if is_last else job.route.could_serve()

    def is_uncompared(self, job: Job, tries: Tries) -> bool:
        """Whether one replica failed and no other was asked, although there are others. Then the fault may be the
        request's own, so it does not count against the replica. Otherwise a client could open breakers with pinned
        requests, or by using up the retry budget."""
        return len(tries.failures) == 1 and self._max_attempts > 1 and len(job.route.could_serve()) > 1

    def is_refused_here(self, job: Job, tries: Tries, answer: Answer, is_whole: bool) -> bool:
        """Whether the replica refuses what another one may serve. The next attempt avoids all replicas that would
        refuse it for the same reason."""
        route = job.route
        replica, served, tried = tries.ticket.replica, route.served, set(tries.replicas)
        if answer.status not in REFUSALS or not is_whole or route.pinned or len(tries.tickets) >= self._max_attempts:
            return False
        if job.has_effects and answer.status != NOT_FOUND:  # it may have run tools before it said so
            return False
        if tried.issuperset(route.could_serve()):
            return False
        length = served.max_tokens.get(replica, 0)
        has_longer = length > 0 and answer.status != NOT_FOUND and self._has_longer(job, length, tried)
        has_media = bool(job.images) and not any(map(is_refusal, tries.failures))
        name = tries.ticket.other_name or job.model
        why = own_refusal(answer.status, answer.look(), name, has_longer=has_longer, has_media=has_media)
        if why == "media_refused" and self._fleet.takes_media(replica) and not self._budget.take(time.monotonic()):
            return False  # most likely every replica says so
        if why == "not_served":
            self._fleet.read_again(replica)
        elif why == "too_long":
            route.needs(length + 1)
        elif why == "media_refused":
            route.refused_by(served.names if len(route.backends) > 1 else {replica})
        return bool(why)

    def _has_longer(self, job: Job, length_tokens: int, tried: Collection[str]) -> bool:
        """Whether a ready replica that was not tried takes a longer prompt."""
        return any(
            each.max_tokens.get(name, inf) > length_tokens and name not in tried and self._fleet.is_ready(name)
            for each in job.route.backends
            for name in each.replicas
        )
