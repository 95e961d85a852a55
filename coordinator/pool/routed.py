"""Places a request of a model that has several backends: one call chooses the backend, and a replica of it.

The pools must be in one Redis: in a Redis Cluster, no script can use the keys of two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson

from coordinator.errors import StoreDown
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
    number: int
    """Among all backends of the model, from 1."""
    weight: int


class Split(NamedTuple):
    """Where the store counts how the requests of a model are shared among its backends."""

    shares: str
    """The key."""
    field: str
    """Of the model, and these weights."""
    stays: str
    """The key of the request's conversation; "" if it has none."""
    has_begun: bool
    """Whether the request continues a conversation, which may have a backend."""


async def choose_way(ways: Sequence[Way], split: Split) -> tuple[Way, Answer | None]:
    """Which of these ways a request goes, and the store's answer there, for Placer.go_on; None: no replica is left.
    Raises StoreError as Placer.place does."""
    began_s = time.monotonic()
    for way in ways:
        if not way.placer.seats.can_wait:
            way.request.must_not_wait()
    served = [way for way in ways if way.request.serving]
    if not served:
        return ways[0], None
    lead = served[0].placer
    answer: Answer | str = ""
    until_s = began_s + IN_ALL * lead.budget_s
    for _ in range(2):
        wire = await lead.enter(None, until_s)
        for way in served:
            way.placer.declare(way.request)
            way.placer.placing.add(way.request.reservation)
        try:
            chosen, answer = await _ask(wire, served, split, began_s, until_s)
            if isinstance(answer, Placement):
                chosen.placer.accept(chosen.request, answer)
        finally:
            for way in served:
                way.placer.placing.discard(way.request.reservation)
        if not isinstance(answer, str):
            return chosen, answer
        if answer == "none":
            return chosen, None
        chosen.placer.make_known(chosen.request, answer)
    raise StoreDown(f"the store does not take this placement: {answer}")


async def _ask(
    wire: Wire, ways: Sequence[Way], split: Split, began_s: float, until_s: float
) -> tuple[Way, Answer | str]:
    """The reply of the script. The first way has a place in its pool's window. Each other one joins its own, although
    that may be the same: two backends can be parts of one pool."""
    lead = ways[0].placer
    for way in ways[1:]:
        way.placer.window.join()
    for way in ways:
        way.placer.sends(way.request)
    undo, forget = partial(_undo_late, ways), partial(_forget, ways)
    try:
        timing = lead.timing(wire, began_s, until_s)
        script = load("route", lead.link.allow_oom, ways[0].request.knobs)
        operands = operands_of(ways, split, lead.link.clock.time_ms(timing.begin_by_s))
        reply = wire.run(script, script.operands(**operands), timing.left_s, undo, until_s)
    except BaseException:
        forget()
        raise
    at, answer = await lead.reply(reply, undo, forget)
    chosen = ways[at - 1]
    return chosen, chosen.placer.heard(wire, timing, answer)


def operands_of(ways: Sequence[Way], split: Split, deadline_ms: int) -> dict[str, Any]:
    """Of route.lua."""
    first, *others = (_placing(way, deadline_ms) for way in ways)
    named = (word for way in reversed(ways) for word in (way.backend, way.number, way.weight))
    counted = (sum(way.weight for way in ways), len(ways), split.shares, split.field)
    conversation = (split.stays, int(split.has_begun))
    keys, arguments = first[1 : 1 + first[0]], first[1 + first[0] :]
    arguments = (*arguments, *map(_packed, reversed(others)), *named, *counted, *conversation)
    return {"placing": keys, "arguments": arguments}


def _placing(way: Way, deadline_ms: int) -> tuple[Any, ...]:
    """How many keys, the keys, and the arguments of `place`."""
    link, request = way.placer.link, way.request
    script = link.place_script(request.knobs)
    return request.operands(script, link.keys, link.gateway, link.epoch, explain=False, deadline_ms=deadline_ms)


def _packed(placing: tuple[Any, ...]) -> bytes:
    """As JSON."""
    count, *texts = (each.decode() if isinstance(each, bytes) else str(each) for each in placing)
    return orjson.dumps((texts[: int(count)], texts[int(count) :]))


def _undo_late(ways: Sequence[Way], late_reply: Any) -> None:
    """The caller gave up before the reply came. It may have gone another way than the store had chosen."""
    chosen = None if isinstance(late_reply, Exception) else ways[late_reply[0] - 1]
    if chosen is not None:
        chosen.placer.undo_late(chosen.request, late_reply[1])
    for way in ways:
        if way is not chosen:
            way.placer.forget_call(way.request.reservation)
            if chosen is not None and chosen.request.is_counted:
                way.placer.was_counted(way.request)


def _forget(ways: Sequence[Way]) -> None:
    for way in ways:
        way.placer.forget_call(way.request.reservation)
