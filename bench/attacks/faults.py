"""Prompts at which every replica fails."""

from __future__ import annotations

import asyncio

from bench.attacks.attack import Outcome
from bench.attacks.target import Answers, Target, chat, counted, post, seen_by_replicas

_PATH = "/v1/chat/completions"
_LEAST_RETRIES, _RETRIED_SHARE = 10, 0.1


async def one_prompt(target: Target) -> Outcome:
    """Sends the same prompt, 15/s for 20 s. Requests to a replica with an open breaker are placed as `last_resort`."""
    before = await _placements(target)
    answers = await _steadily(target, 15.0, [chat(lie="error")] * 300)
    placed, last_resort = (after - at for after, at in zip(await _placements(target), before, strict=True))
    missed = f"{last_resort:.0f} placements as last_resort" if last_resort else ""
    return Outcome(f"{counted(answers)}; {last_resort:.0f} of {placed:.0f} placements went last_resort", missed)


async def many_prompts(target: Target) -> Outcome:
    """Sends different prompts, 30/s for 10 s. Allowed retries: a tenth of all requests (the honest client's included)
    plus 10."""
    before, seen = await _requests_and_retries(target), await seen_by_replicas(target)
    prompts = [chat(b"%d is a prompt of its own" % index, lie="error") for index in range(300)]
    answers = await _steadily(target, 30.0, prompts)
    ratio = (await seen_by_replicas(target) - seen)["error"] / len(prompts)
    requests, retries = (after - at for after, at in zip(await _requests_and_retries(target), before, strict=True))
    allowed = _LEAST_RETRIES + _RETRIED_SHARE * requests
    missed = f"{retries:.0f} retries, of {allowed:.0f}" if retries > allowed else ""
    return Outcome(f"{counted(answers)}; replicas saw {ratio:.2f} requests for each", missed)


async def _steadily(target: Target, per_s: float, bodies: list[bytes]) -> list[Answers]:
    """Sends each body on its own connection at this rate, however long the others take."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body in bodies:
            tasks.append(group.create_task(target.ask(post(_PATH, body))))
            await asyncio.sleep(1 / per_s)
    return [task.result() for task in tasks]


async def _requests_and_retries(target: Target) -> tuple[float, float]:
    """Requests and retries until now."""
    return await target.metric("kvgate_requests_total"), await target.metric("kvgate_retries_total")


async def _placements(target: Target) -> tuple[float, float]:
    """Placements until now: all, and those of last resort."""
    name = "kvgate_decisions_total"
    return await target.metric(name), await target.metric(name, why="last_resort")
