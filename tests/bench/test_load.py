"""The client of the benchmarks, when servers do not answer."""

from __future__ import annotations

from bench.load import run
from bench.workloads import Session, one_turn, user, words
from gateway.ops.local.ports import free_ports

CLIENTS = 3


async def test_what_answers_nobody_is_given_up_and_everything_counts_as_failed() -> None:
    asked: list[Session] = []
    (port,) = free_ports(1)

    async def nowhere(session: Session, _body: object) -> str:
        asked.append(session)
        return f"http://127.0.0.1:{port}"

    result = await run([one_turn(number, user(words("x"))) for number in range(50)], nowhere, CLIENTS)
    assert (result.requests, result.failed) == (0, 50)
    assert len(asked) <= 3 * CLIENTS
