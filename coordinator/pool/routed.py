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
from coordinator.keys import shares_key, stays_key
from coordinator.placement import Answer, Placement, PlaceRequest
from coordinator.pool.placer import Placer
from coordinator.redis.time_limit import IN_ALL
from coordinator.redis.wire import Wire
from coordinator.scripts import signature

_PLACE = signature("place")
_KEYS = sum(not one.is_many for one in _PLACE.keys)
_ARGUMENTS = sum(not one.is_many for one in _PLACE.args)
_CHAIN_AT = [one.name for one in _PLACE.args].index("chain") + 1

STAY_MS = 30 * 60 * 1000
"""A conversation stays with its backend for one to two of these after its last request."""


class Way(NamedTuple):
    """One of the backends: its placer, and what that is asked."""

    placer: Placer
    request: PlaceRequest
    backend: str
    weight: int


class Split(NamedTuple):
    """Where the store counts how the requests of a model are shared among its backends."""

    namespace: str
    model: str
    """Its slug."""
    conversation: str
    """32 hex digits that name the request's conversation; "" if it has none."""
    has_begun: bool
    """Whether the request continues the conversation, which may have a backend."""


async def choose_way(ways: Sequence[Way], split: Split) -> tuple[Way, Answer | None]:
    """Which of these ways a request goes, and the store's answer there, for Placer.place; None: no replica is left.
    Raises StoreError as Placer.place does. The first way costs the store least."""
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
        script = wire.script("route", ways[0].request.knobs)
        clock = lead.link.clock
        now_ms = clock.time_ms(timing.sent_s) or int(time.time() * 1000)  # Redis has not told its time yet
        operands = operands_of(ways, split, now_ms, clock.time_ms(timing.begin_by_s))
        reply = wire.run(script, script.operands(**operands), timing.left_s, undo, until_s)
    except BaseException:
        forget()
        raise
    *answer, at = await lead.reply(reply, undo, forget)
    chosen = ways[at - 1]
    return chosen, chosen.placer.heard(wire, timing, answer, chosen.request.bill)


def operands_of(ways: Sequence[Way], split: Split, now_ms: int, deadline_ms: int) -> dict[str, Any]:
    """Of route.lua, at this time of Redis. For another backend than the first one, it gets only what differs there:
    Redis' Lua takes time for all that it gets, also if it is not used."""
    lead, *rest = ways
    count, *first = _placing(lead, deadline_ms)
    others, steps = [], list[str]()
    for way in rest:
        others.append(_other(way, lead, first, len(steps), deadline_ms))
        steps += (f"{key}{tokens:8d}" for key, tokens in zip(way.request.keys, way.request.tokens, strict=True))
    stays = (stays_key(split.namespace, split.conversation, now_ms // STAY_MS - past) for past in (0, 1))
    told = f"{split.model}.{split.conversation} {' '.join(stays)}" if split.conversation else "- - -"
    weights = " ".join(f"{way.backend} {way.weight}" for way in ways)
    choice = (
        f"{lead.backend} {lead.weight} {sum(way.weight for way in ways)} {split.has_begun:d} {told}"
        f" {shares_key(split.namespace)} {split.model} {weights}"
    )
    return {"placing": first[:count], "arguments": (*first[count:], "".join(steps), orjson.dumps(others), choice)}


def _other(way: Way, lead: Way, first: Sequence[Any], before: int, deadline_ms: int) -> tuple[Any, ...]:
    """How `place` is asked there, but for its chain."""
    count, *placing = _placing(way, deadline_ms)
    base, our_base = way.placer.link.keys.base, lead.placer.link.keys.base
    keys = _changes([base + key.removeprefix(our_base) for key in first[:_KEYS]], placing[:_KEYS])
    at = _KEYS + len(lead.request.keys)
    arguments = _changes(first[at : at + _ARGUMENTS], placing[count : count + _ARGUMENTS], _CHAIN_AT)
    length = len(way.request.keys)
    return way.backend, way.weight, before, length, f"{base}:", keys, _ARGUMENTS, arguments, _CHAIN_AT


def _placing(way: Way, deadline_ms: int) -> tuple[Any, ...]:
    """How many keys, the keys, and the arguments of `place`."""
    link, request = way.placer.link, way.request
    script = link.place_script(request.knobs)
    return request.operands(script, link.keys, link.gateway, link.epoch, explain=False, deadline_ms=deadline_ms)


def _changes(ours: Sequence[Any], theirs: Sequence[Any], without: int = 0) -> list[Any]:
    """The number of each that differs, from 1, and what it is there."""
    pairs = enumerate(zip(ours, theirs, strict=True), 1)
    differ = ((at, there) for at, (here, there) in pairs if here != there and at != without)
    return [each for at, there in differ for each in (at, there.decode() if isinstance(there, bytes) else str(there))]


def _undo_late(ways: Sequence[Way], late_reply: Any) -> None:
    """The caller gave up before the reply came. It may have gone another way than the store had chosen."""
    chosen = None if isinstance(late_reply, Exception) else ways[late_reply[-1] - 1]
    if chosen is not None:
        chosen.placer.undo_late(chosen.request, late_reply[:-1])
    for way in ways:
        if way is not chosen:
            way.placer.forget_call(way.request.reservation)
            if chosen is not None and chosen.request.is_counted:
                way.placer.was_counted(way.request)


def _forget(ways: Sequence[Way]) -> None:
    for way in ways:
        way.placer.forget_call(way.request.reservation)
