"""The client of the benchmarks, when servers do not answer."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from bench.load import run
from bench.workloads import Session, one_turn, user, words
from gateway.ops.local.ports import free_ports
from tests.web_server import serving

CLIENTS = 3


def answering(delay_s: float) -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(delay_s)
        chunk = {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1}}
        return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    return application


async def test_what_fails_some_at_once_and_answers_others_later_is_not_given_up() -> None:
    (dead,) = free_ports(1)
    async with serving(answering(0.3)) as url:

        async def one_in_three_answers(session: Session, _body: object) -> str:
            return url if session.group % CLIENTS == 0 else f"http://127.0.0.1:{dead}"

        sessions = [one_turn(number, user(words("x"))) for number in range(30)]
        result = await run(sessions, one_in_three_answers, CLIENTS)
    assert (result.requests, result.failed) == (10, 20)


async def test_what_answers_nobody_is_given_up_and_everything_counts_as_failed() -> None:
    asked: list[Session] = []
    (port,) = free_ports(1)

    async def nowhere(session: Session, _body: object) -> str:
        asked.append(session)
        return f"http://127.0.0.1:{port}"

    result = await run([one_turn(number, user(words("x"))) for number in range(50)], nowhere, CLIENTS)
    assert (result.requests, result.failed) == (0, 50)
    assert len(asked) <= 3 * CLIENTS
