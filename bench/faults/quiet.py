"""Checks after the load has ended: no load is left, and the map predicts the engines' caches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from bench.faults.load import BadEnd, Load, Prediction
from bench.faults.problems import look_at_sums
from bench.faults.queue import queue_keys
from bench.faults.stage import Stage
from coordinator.errors import StoreError

_ZERO_WITHIN_S = 5.0
_POLL_S = 0.1
_ASKED_AGAIN = 2


async def left_in_sums(stage: Stage) -> str:
    """The load that is left, in words. Empty if none is left."""
    return await _left(stage, _load)


async def left_in_queue(stage: Stage) -> str:
    """The keys of the queue that are left, in words. Empty if none are left."""
    return await _left(stage, _queue)


async def _left(stage: Stage, look: Callable[[Stage], Awaitable[str]]) -> str:
    deadline_s = stage.now_s() + _ZERO_WITHIN_S
    while True:
        problem = await look(stage)
        if not problem or stage.now_s() > deadline_s:
            return problem
        await asyncio.sleep(_POLL_S)


async def _queue(stage: Stage) -> str:
    try:
        left = await queue_keys(stage.line, stage.keys)
    except StoreError as error:
        return f"queue cannot be read: {error}"
    return f"left of the queue: {', '.join(left)}" if left else ""


async def _load(stage: Stage) -> str:
    try:
        sums = await look_at_sums(stage)
    except (StoreError, ValueError) as error:
        return f"cannot be read: {error}"
    if sums.are_zero:
        return ""
    active = {name: count for name, count in sums.active.items() if count}
    tokens = {name: count for name, count in sums.backlog_tokens.items() if count}
    return f"left: {sums.in_flight} in flight, active {active}, backlog_tokens {tokens}"


async def predictions(stage: Stage, load: Load) -> tuple[int, list[str]]:
    """Sends one request after another, for every beginning, through changing gateways. Returns the number of
    predictions and the wrong ones in words."""
    wrong: list[str] = []
    for number, context in enumerate(load.contexts):
        try:
            wrong += _wrong(await _predicted(load, context, number % len(stage.gateways)))
        except (BadEnd, TimeoutError, aiohttp.ClientError, OSError) as error:
            wrong.append(f"no answer: {type(error).__name__} {error}".strip())
    return len(load.contexts), wrong


async def _predicted(load: Load, context: str, gateway: int) -> Prediction:
    """Asks again if a busy machine kept the gateway waiting for Redis beyond its limit."""
    for _ in range(_ASKED_AGAIN):
        prediction = await load.predict(context, gateway)
        if prediction.state != "fallback":
            return prediction
    return await load.predict(context, gateway)


def _wrong(prediction: Prediction) -> Sequence[str]:
    if prediction.state != "exact":
        return [f"{prediction.replica} is {prediction.state}"]
    if prediction.is_right:
        return []
    foretold = f"{prediction.matched_tokens} to {prediction.boundary_tokens}"
    return [f"{prediction.replica} had {prediction.cached_tokens} tokens, {foretold} were foretold"]
