"""Finds out when a request's prefill is over if its answer is not streamed: then nobody sees its first token.

Its backlog ends when the replica's events have made the request's tip resident, or after the time that its prefill is
predicted to take. A gateway checks its own such requests at each heartbeat; no request waits for that. If the replica
has no agent and its engine does not say how fast it computes, the backlog ends with the answer.

If a prediction is too short, the next prompt comes too early and the balance is a little worse. If it is too long, the
replica looks busier than it is, at most until the answer is there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from functools import partial
from math import inf

from coordinator.placement import NO_TIP, Reservation
from coordinator.pool.link import Link
from coordinator.pool.reservations import Reservations
from coordinator.redis.wire import has_result
from coordinator.registry import PoolState, ReplicaRecord

_SAFETY = 2.0
"""Factor for the request's own tokens: a long prompt takes longer per token than the mean, and steps are shared."""
_QUEUE_SHARE = 0.5
"""The share of the other queued tokens that is assumed to be computed first. The rest came later, or its prefill is
over but it still counts. If all counted, each backlog that counts too long would lengthen the next one. Under load, no
backlog would end before its answer."""
_LOOKUPS = 256
"""The most per heartbeat, by chance: requests of an engine that hangs must not keep others from being checked."""


def prefill_tokens_per_s(counters: Mapping[str, float]) -> float | None:
    """How fast an engine has computed prompts since it started, by its own counters (named in
    coordinator/engine/facts.py); None if they do not tell. The engine is usually faster: if prefills share a step,
    its time counts for each of them. Prompts that others have computed for it would make it look far faster."""
    if counters.get("transfers"):
        return None
    tokens, seconds = counters.get("prefill_computed_tokens", 0.0), counters.get("prefill_s", 0.0)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def predicted_s(own_tokens: int, other_tokens: int, tokens_per_s: float) -> float:
    """How long a prefill of `own_tokens` is likely to take at most, with `other_tokens` queued on its replica as
    well."""
    return (_SAFETY * own_tokens + _QUEUE_SHARE * max(0, other_tokens)) / tokens_per_s


def is_computed(record: bytes | None, life: ReplicaRecord) -> bool:
    """Whether a record of `own:<tip>` says that this incarnation of the replica holds the whole prompt, by its
    events."""
    match (record or b"").split(b" "):
        case [incarnation, b"resident", _, _, _, _, entry, *_]:
            return incarnation == life.incarnation.encode() and entry.isdigit() and int(entry) >= life.floor
    return False


class Prefills:
    """Ends the backlog of live reservations that are not streamed."""

    def __init__(self, link: Link, reservations: Reservations) -> None:
        self._link = link
        self._live, self._end_backlog = reservations.live, reservations.first_token
        self._tokens_per_s: dict[str, float] = {}

    def observe(self, replica: str, counters: Mapping[str, float]) -> None:
        """Take note of the replica's engine counters as they are now."""
        tokens_per_s = prefill_tokens_per_s(counters)
        if tokens_per_s is not None:
            self._tokens_per_s[replica] = tokens_per_s

    def tokens_per_s(self, replica: str) -> float | None:
        """How fast the replica computes prompts; None if its engine does not tell."""
        return self._tokens_per_s.get(replica)

    def end_finished_backlogs(self, state: PoolState) -> None:
        """At a heartbeat: end the backlogs whose prefill is over by prediction, predict the new ones, and look up the
        tips of the others."""
        now_s = time.monotonic()
        if len(self._tokens_per_s) > len(state.replicas):
            self._tokens_per_s = {name: rate for name, rate in self._tokens_per_s.items() if name in state.replicas}
        unpredicted, waiting = [], []
        for one in self._live.values():
            if one.is_streamed or not one.backlog_tokens:
                continue
            if one.prefilled_by_s is not None and one.prefilled_by_s <= now_s:
                self._end_backlog(one.id)
                continue
            if one.prefilled_by_s is not None:
                waiting.append(one)  # not at the first heartbeat: then it is likely still being computed
            if one.prefilled_by_s in (None, inf):
                one.prefilled_by_s = inf
                unpredicted.append(one)
        self._predict([one for one in unpredicted if one.replica in self._tokens_per_s], now_s)
        told = [one for one in waiting if _tells_tip(state, one)]
        for one in random.sample(told, min(len(told), _LOOKUPS)):
            record = self._link.read("HGET", self._link.keys.own(one.tip), one.replica)
            record.add_done_callback(partial(self._end_if_computed, one, state.replicas[one.replica]))

    def _predict(self, ones: list[Reservation], now_s: float) -> None:
        if ones:
            replicas = list(dict.fromkeys(one.replica for one in ones))
            queued = self._link.read("HMGET", self._link.keys.backlog_tokens, *replicas)
            queued.add_done_callback(partial(self._set_due, ones, replicas, now_s))

    def _set_due(
        self, ones: list[Reservation], replicas: list[str], now_s: float, queued: asyncio.Future[list[bytes | None]]
    ) -> None:
        if not has_result(queued):
            return  # they are still unpredicted at the next heartbeat
        queued_tokens = {
            replica: int(text) if text is not None and text.isdigit() else 0
            for replica, text in zip(replicas, queued.result(), strict=True)
        }
        for one in ones:
            tokens_per_s = self._tokens_per_s.get(one.replica)
            if tokens_per_s is not None:
                others = queued_tokens[one.replica] - one.backlog_tokens
                one.prefilled_by_s = now_s + predicted_s(one.backlog_tokens, others, tokens_per_s)

    def _end_if_computed(self, one: Reservation, life: ReplicaRecord, record: asyncio.Future[bytes | None]) -> None:
        if has_result(record) and is_computed(record.result(), life) and self._live.get(one.id) is one:
            self._end_backlog(one.id)


def _tells_tip(state: PoolState, one: Reservation) -> bool:
    """Whether events can tell that the request's prompt is computed."""
    life = state.replicas.get(one.replica)
    return (
        life is not None
        and life.incarnation == one.incarnation
        and one.tip not in ("", NO_TIP)
        and state.is_told(one.replica)
    )
