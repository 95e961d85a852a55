"""Attacks on connections: pipelined heads, bodies that never come, streams that nobody reads, clients that hang up."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from bench.attacks.attack import Outcome
from bench.attacks.target import Answers, Target, chat, counted, head, post, send

_CHAT = "/v1/chat/completions"
_HOLDS_S = 10.0
_RETRY_S = 1.0
"""The value of Retry-After. A client that comes back sooner is a flood, which is another attack."""
WRITE_S = 2.0
_UPGRADES = 4200


async def upgrades(target: Target) -> Outcome:
    """Sends all heads in one write."""
    asks = b"GET /health HTTP/1.1\r\nhost: g\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    reader, writer = await target.connect()
    answers = Answers()
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(send(writer, [asks * _UPGRADES]))
        await answers.read(reader, _UPGRADES)
        sending.cancel()
    writer.transport.abort()
    ended = f", then {answers.why}" if answers.why else ""
    return Outcome(f"{answers.statuses.total()} of {_UPGRADES} answered{ended}")


async def pipelined_heads(target: Target) -> Outcome:
    """Sends the heads behind a request that takes long."""
    slow = b"".join(post(_CHAT, chat(lie="slow")))
    heads = head("GET", "/health") * (250 * 1024 // len(head("GET", "/health")))

    async def hold() -> int:
        reader, writer = await target.connect()
        answers = Answers()
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send(writer, [slow + heads]))
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLDS_S / 2):
                    await answers.read(reader, 10**9)
            sending.cancel()
        writer.transport.abort()
        return answers.statuses.total()

    answered = await asyncio.gather(*(hold() for _ in range(20)))
    return Outcome(f"{sum(answered)} answers in {_HOLDS_S / 2:g} s, then hung up")


async def one_byte_bodies(target: Target) -> Outcome:
    """A client that the gateway sends away comes back a second later."""
    until_s = time.perf_counter() + _HOLDS_S

    async def hold() -> list[str]:
        got = []
        while (left_s := until_s - time.perf_counter()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    answer = await target.ask([head("POST", _CHAT, 1000), b"{"])
            except TimeoutError:
                got.append("held to the end")
                break
            got.append(str(answer))
            await asyncio.sleep(min(_RETRY_S, left_s))
        return got

    held = await asyncio.gather(*(hold() for _ in range(1024)))
    return Outcome(counted(each for one in held for each in one))


async def unread_streams(target: Target) -> Outcome:
    """Fifty clients ask for a stream that never ends, and read nothing of it."""
    ask = b"".join(post(_CHAT, chat(lie="flood", stream=True)))
    writers = []
    for _ in range(50):
        _, writer = await target.connect(receive_bytes=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(ask)
        writers.append(writer)
    await asyncio.sleep(WRITE_S)
    left = await _left_in_flight(target, 3 * WRITE_S)
    for writer in writers:
        writer.transport.abort()
    return Outcome(*_held(left, f"50 not read for {4 * WRITE_S:g} s"))


async def hang_up_behind_pipelined(target: Target) -> Outcome:
    """Twenty clients send a request that takes long and another one behind it, then close."""
    first, second = (b"".join(post(_CHAT, chat(lie=name))) for name in ("slow", ""))
    for _ in range(20):
        _, writer = await target.connect()
        writer.write(first)
        await writer.drain()
        await asyncio.sleep(0.02)  # in a separate packet
        writer.write(second)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
    return Outcome(*_held(await _left_in_flight(target, 5.0), "20 closed"))


async def _left_in_flight(target: Target, within_s: float) -> int:
    """The smallest number of requests in flight within this time. The honest client's request comes and goes."""
    until_s, least = time.perf_counter() + within_s, 10**6
    while least > 0 and time.perf_counter() < until_s:
        least = min(least, int(await target.metric("kvgate_requests_in_flight")))
        await asyncio.sleep(0.1)
    return least


def _held(left: int, what: str) -> tuple[str, str]:
    return f"{what}: {left} still in flight", f"{left} still in flight" if left else ""
