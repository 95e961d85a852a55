"""The cost of one request: the memory held for it, and the number of writes to the client's socket."""

from __future__ import annotations

import asyncio
import sys

import httpx
import pytest

from gateway.http.exchange import Exchange
from gateway.http.protocol import HttpProtocol
from gateway.relay import relay
from tests.gateway.scripted import ASKED, CHAT, Relayed, chunk, head, whole

STREAM = ("content-type: text/event-stream", "transfer-encoding: chunked")
FIRST = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
LAST = b'data: {"choices":[{"delta":{"content":"two"}}]}\n\ndata: [DONE]\n\n'


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The data of each write to the client."""
    written: list[bytes] = []
    write = HttpProtocol.write

    def noted(protocol: HttpProtocol, data: bytes) -> None:
        written.append(data)
        write(protocol, data)

    monkeypatch.setattr(HttpProtocol, "write", noted)
    return written


async def test_a_body_that_is_made_anew_for_the_replica_is_held_once(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bytes | bytearray] = []
    take, answering, go_on = Exchange.take, asyncio.Event(), asyncio.Event()

    def noted(exchange: Exchange) -> bytes | bytearray:
        taken.append(take(exchange))
        return taken[-1]

    async def answer(writer: asyncio.StreamWriter) -> None:
        answering.set()
        await go_on.wait()
        writer.write(whole(b"{}"))

    monkeypatch.setattr(Exchange, "take", noted)
    relayed.replica.answer = answer
    async with asyncio.TaskGroup() as group:
        request = group.create_task(relayed.ask(session_id="is taken out"))
        await answering.wait()
        assert b"is taken out" in taken[0]
        references, those_of_this_test = sys.getrefcount(taken[0]), 2  # the list's and the call's
        assert references == those_of_this_test
        assert relayed.gateway.admission.held_bytes.taken < len(taken[0])
        go_on.set()
    assert request.result().status_code == 200


async def test_a_stream_that_comes_at_once_goes_out_at_once(relayed: Relayed, writes: list[bytes]) -> None:
    relayed.replica.says(head(*STREAM) + chunk(FIRST + LAST) + chunk(b""))
    assert (await relayed.stream()).content == FIRST + LAST
    assert len(writes) == 1


async def test_its_head_goes_out_with_its_first_event_and_its_end_with_its_last(
    relayed: Relayed, writes: list[bytes]
) -> None:
    go_on = asyncio.Event()
    relayed.replica.says(head(*STREAM) + chunk(FIRST), go_on, chunk(LAST) + chunk(b""))
    async with relayed.http.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer:
        pieces = answer.aiter_bytes()
        got = await anext(pieces)
        go_on.set()
        got += b"".join([piece async for piece in pieces])
    assert got == FIRST + LAST
    assert len(writes) == len((FIRST, LAST))


@pytest.mark.parametrize("ending", ["shutdown", "client gone"])
async def test_an_answer_that_is_complete_stays_so_while_a_slow_client_takes_the_last_of_it(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    write, usage = HttpProtocol.write, b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'

    def filling(protocol: HttpProtocol, data: bytes) -> None:
        write(protocol, data)
        if b"[DONE]" in data:  # now the client reads no more for a while
            protocol.pause_writing()
            exchange = protocol._answering
            assert exchange is not None
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, exchange.task.cancel if ending == "shutdown" else protocol._transport.abort)

    monkeypatch.setattr(HttpProtocol, "write", filling)
    monkeypatch.setattr(relay, "_WRITE_AHEAD_BYTES", 10)
    relayed.replica.says(head(*STREAM) + chunk(FIRST + usage + LAST) + chunk(b""))
    asked = relayed.ask(stream=True, stream_options={"include_usage": True})
    if ending == "shutdown":
        assert (await asked).content == FIRST + usage + LAST
    else:
        with pytest.raises(httpx.TransportError):
            await asyncio.wait_for(asked, 5)
    assert 'kvgate_prompt_tokens_total{replica="r0"} 7.0' in relayed.gateway.metrics.exposition().decode()


async def test_events_that_come_with_a_broken_end_reach_the_client(relayed: Relayed) -> None:
    relayed.replica.says(head(*STREAM) + chunk(FIRST) + chunk(b""))
    said = (await relayed.stream()).content
    assert said.startswith(FIRST)
    assert b"stream_broken" in said.removeprefix(FIRST)
