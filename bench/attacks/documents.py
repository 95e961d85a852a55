"""Attacks with JSON bodies: many small values, deep values, large values, several at once, clients that hang up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from bench.attacks.attack import Outcome, Run, one_request
from bench.attacks.target import LIMIT_BYTES, Answers, Target, chat, counted, post, send

_PATH = "/v1/chat/completions"
_MESSAGE = b'{"role":"user","content":"hi"}'
_FAIR_S = 6.0
_FAIR_WORST_MS = 1000.0
"""For a body of 1.3 MB beside six of 2 MB. It is about the reading time of this body plus one of the others."""


def _list(unit: bytes, size_bytes: int) -> bytes:
    return b"[" + (unit + b",") * (size_bytes // (len(unit) + 1)) + unit + b"]"


def messages(size_bytes: int, unit: bytes = _MESSAGE) -> bytes:
    """A chat of this size that repeats one kind of message."""
    return b'{"model":"canned","messages":%b}' % _list(unit, size_bytes - 200)


def body_of(make: Callable[[], bytes], path: str = _PATH) -> Run:
    """Sends one body, which is made only when it is needed."""

    async def run(target: Target) -> Outcome:
        return await one_request(target, path, make())

    return run


def mixed(size_bytes: int) -> bytes:
    """One third each: a long text, nested objects, nested lists."""
    part = size_bytes // 3
    objects = _list(b'{"a":{"b":[1,2,{"c":null}]},"d":"e"}', part)
    lists = _list(b"[" * 400 + b"]" * 400, part)
    text = b'{"role":"user","content":"%b"}' % (b"word " * (part // 5))
    return b'{"model":"canned","messages":[%b],"metadata":{"a":%b,"b":%b}}' % (text, objects, lists)


def one_string() -> bytes:
    return chat(b"word " * ((LIMIT_BYTES - 200) // 5))


def commas() -> bytes:
    """Commas and brackets inside a string. A parser that ignores strings takes them for structure."""
    return chat(b",[{" * ((LIMIT_BYTES - 200) // 3))


def numbers() -> bytes:
    return b'{"model":"canned","prompt":%b}' % _list(b"1", LIMIT_BYTES - 200)


def nested() -> bytes:
    half = (LIMIT_BYTES - 200) // 2
    return b'{"model":"canned","messages":' + b"[" * half + b"]" * half + b"}"


def beside_six(make: Callable[[], bytes]) -> Run:
    """Six connections of one client send a body again and again. The waits of another client are measured: its body has
    1.3 MB and is plain text."""

    async def run(target: Target) -> Outcome:
        body = make()
        until_s = time.perf_counter() + _FAIR_S
        async with asyncio.TaskGroup() as group:
            theirs = [group.create_task(_again_and_again(target, body, until_s)) for _ in range(6)]
            waits_ms, ours = await _measured(target, until_s)
        worst_ms = max(waits_ms)
        got = counted(answer for task in theirs for answer in task.result())
        missed = (
            f"another's 1.3 MB waited {worst_ms:,.0f} ms, of {_FAIR_WORST_MS:,.0f}" if worst_ms > _FAIR_WORST_MS else ""
        )
        return Outcome(f"{got}; another's 1.3 MB: {counted(ours)}, {worst_ms:,.0f} ms at worst", missed)

    return run


async def _again_and_again(target: Target, body: bytes, until_s: float) -> list[Answers]:
    answers = []
    while time.perf_counter() < until_s:
        answers.append(await target.ask(post(_PATH, body)))
        await asyncio.sleep(0.01)  # a body that is refused at once must not become a flood, which is another attack
    return answers


async def _measured(target: Target, until_s: float) -> tuple[list[float], list[Answers]]:
    body = chat(b"word " * 260_000)
    waits_ms: list[float] = []
    answers: list[Answers] = []
    while not waits_ms or time.perf_counter() < until_s:
        await asyncio.sleep(0.3)
        started_s = time.perf_counter()
        answers.append(await target.ask(post(_PATH, body), target.honest))
        waits_ms.append((time.perf_counter() - started_s) * 1000)
    return waits_ms, answers


async def hang_up(target: Target) -> Outcome:
    """Ten clients send 8 MB each that take long to read, and hang up at once."""
    body = messages(8_000_000, b"{}")

    async def send_and_leave() -> None:
        with suppress(OSError):
            _, writer = await target.connect()
            writer.transport.set_write_buffer_limits(0)  # `send` returns only when all bytes have left
            await send(writer, post(_PATH, body))
            writer.close()

    await asyncio.gather(*(send_and_leave() for _ in range(10)))
    return Outcome("hung up 10 times")
