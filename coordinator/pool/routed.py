"""Places a request of a model that has several backends: one call chooses the backend, and a replica of it.

The pools must be in one Redis: in a Redis Cluster, no script can use the keys of two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from coordinator.placement import Placement, PlaceRequest
from coordinator.pool.placer import Answer, Placer
from coordinator.redis.time_limit import IN_ALL
from coordinator.redis.wire import Wire
from coordinator.scripts import load


class Way(NamedTuple):
    """One of the backends: its placer, and what that is asked."""

    placer: Placer
    request: PlaceRequest
    backend: str
    place: int
    """Among all backends of the model, from 1."""
    weight: int


class Split(NamedTuple):
    """Where the store counts how the requests of a model are shared among its backends: two keys."""

    shares: str
    stays: str
    """Of the request's conversation; that of `shares` if it has none."""


async def choose_way(ways: Sequence[Way], split: Split) -> tuple[Way, Answer | None]:
    """Which of these ways a request goes, and the store's answer there, for Placer.go_on. No answer: that pool is to be
    asked by itself, because the store does not know its replicas, or this gateway. Raises StoreError as Placer.place
    does."""
    began_s = time.monotonic()
    for way in ways:
        if not way.placer.seats.can_wait:
            way.request.must_not_wait()
    lead = ways[0].placer
    until_s = began_s + IN_ALL * lead.budget_s
    wire = await lead.enter(None, until_s)
    declared = [way for way in ways if way.placer.declare(way.request)]
    if not declared:
        lead.window.give_back()
        return ways[0], None
    for way in declared:
        way.placer.placing.add(way.request.reservation)
    try:
        chosen, answer = await _ask(wire, lead, declared, split, began_s, until_s)
        if isinstance(answer, Placement):
            chosen.placer.accept(chosen.request, answer)
    finally:
        for way in declared:
            way.placer.placing.discard(way.request.reservation)
    return chosen, None if isinstance(answer, str) else answer


async def _ask(
    wire: Wire, lead: Placer, ways: Sequence[Way], split: Split, began_s: float, until_s: float
) -> tuple[Way, Answer | str]:
    """The reply of the script, which has a place in the window of the lead."""
    for way in ways:
        if way.placer is not lead:
            way.placer.window.join()
        way.placer.sends(way.request)
    undo, forget = partial(_undo_late, ways), partial(_forget, ways)
    try:
        timing = lead.timing(wire, began_s, until_s)
        script = load("route", lead.link.allow_oom, ways[0].request.knobs)
        operands = _operands(ways, split, lead.link.clock.time_ms(timing.begin_by_s))
        reply = wire.run(script, script.operands(**operands), timing.left_s, undo, until_s)
    except BaseException:
        forget()
        raise
    at, answer = await lead.reply(reply, undo, forget)
    chosen = ways[at - 1]
    return chosen, chosen.placer.heard(wire, timing, answer)


def _operands(ways: Sequence[Way], split: Split, deadline_ms: int) -> dict[str, Any]:
    """Of route.lua."""
    keys: list[Any] = []
    arguments: list[Any] = []
    backends = []
    for way in ways:
        link, request = way.placer.link, way.request
        count, *placing = request.operands(
            link.place_script(request.knobs),
            link.keys,
            link.gateway,
            link.epoch,
            explain=False,
            deadline_ms=deadline_ms,
        )
        keys += placing[:count]
        arguments += placing[count:]
        backends.append(f"{way.backend} {way.place} {way.weight} {count} {len(placing) - count}")
    return {
        "shares": split.shares,
        "stays": split.stays,
        "placing": keys,
        "backends": " ".join(backends),
        "arguments": arguments,
    }


def _undo_late(ways: Sequence[Way], late_reply: Any) -> None:
    """The caller gave up before the reply came."""
    refused = isinstance(late_reply, Exception)
    chosen = None if refused else ways[late_reply[0] - 1]
    for way in ways:
        if way is chosen:
            way.placer.undo_late(way.request, late_reply[1])
        else:
            way.placer.forget_call(way.request.reservation)


def _forget(ways: Sequence[Way]) -> None:
    for way in ways:
        way.placer.forget_call(way.request.reservation)
