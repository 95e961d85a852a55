"""Pipelined requests: the server reads any number of them one at a time, wherever the bytes are split."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.http import protocol as protocol_module
from gateway.http.exchange import Exchange
from gateway.http.parser import RequestParser
from tests.gateway.http.conftest import CLOSE, Served, Wire, echo_after
from tests.polling import eventually

GET = b"GET /get HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = b"POST /up HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: \r\n"


def posted(path: bytes, body: bytes) -> bytes:
    return b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body)


def chunked(path: bytes, *chunks: bytes) -> bytes:
    head = b"POST /%b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % path
    return head + b"".join(b"%x;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\na: b\r\n\r\n"


class Counted(Exchange):
    """Counts the exchanges that are made."""

    __slots__ = ()
    made = 0

    def __init__(self, *arguments: Any) -> None:
        Counted.made += 1
        super().__init__(*arguments)


async def answers_to(reads: Sequence[bytes], count: int) -> list[bytes]:
    """The bodies of the answers to the `count` requests in these reads. No request begins before the previous one is
    answered."""
    connection, wire = Served().connection(), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    Counted.made = answered = 0
    for data in reads:
        connection.data_received(data)
        assert Counted.made <= answered + 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answered = wire.said.count(b"200 OK")
    await eventually(lambda: wire.said.count(b"200 OK") == count)
    connection.connection_lost(None)
    return [answer.partition(b"\r\n\r\n")[2] for answer in wire.said.split(b"HTTP/1.1 200 OK")[1:]]


async def test_wherever_they_are_cut_each_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bodies look like requests."""
    monkeypatch.setattr(protocol_module, "Exchange", Counted)
    requests = {
        GET: b"GET /get  0",
        posted(b"a", GET): b"POST /a  %d" % len(GET),
        chunked(b"b", GET, b"\r\n" + GET + GET, b"0\r\n\r\n" + GET): b"POST /b  %d" % (4 * len(GET) + 7),
        posted(b"c", b"GET /x HTTP/1."): b"POST /c  14",
        GET.replace(b"get", b"got"): b"GET /got  0",
        chunked(b"d", b"x"): b"POST /d  1",
        posted(b"e", b"\n" + GET): b"POST /e  %d" % (len(GET) + 1),
    }
    sent = b"".join(requests)
    bytewise = [sent[at : at + 1] for at in range(len(sent))]
    for reads in [[sent], bytewise, *([sent[:at], sent[at:]] for at in range(1, len(sent)))]:
        assert await answers_to(reads, len(requests)) == list(requests.values()), reads


async def test_beyond_what_is_kept_they_are_not_answered_and_the_client_is_told(served: Served) -> None:
    go_on = asyncio.Event()

    served.handle = echo_after(go_on)
    async with served.client() as (reader, writer):
        writer.write(GET * 10_000)
        await writer.drain()
        (connection,) = await eventually(lambda: served.state.connections)
        await eventually(lambda: connection._is_deaf)
        assert not connection._kept
        go_on.set()
        said = await asyncio.wait_for(reader.readuntil(b"GET /get  0"), 5)
    assert (said.count(b"200 OK"), said.count(CLOSE)) == (1, 1)


async def test_a_client_that_asks_on_without_reading_is_answered_when_it_reads(served: Served) -> None:
    begun = 0

    async def large(exchange: Exchange) -> None:
        nonlocal begun
        begun += 1
        exchange.whole(200, [], b"x" * 2**20)

    served.handle = large
    async with served.client() as (reader, writer):
        writer.write(GET * 99 + b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
        await eventually(lambda: begun > 0)
        before = -1
        while before != begun:
            before = begun
            await asyncio.sleep(0.05)
        assert begun < 50
        said = await asyncio.wait_for(reader.read(), 30)
    assert (begun, said.count(b"HTTP/1.1 200 OK")) == (100, 100)


async def test_a_client_that_hangs_up_behind_what_it_sent_ahead_is_noticed(served: Served) -> None:
    stopped = asyncio.Event()

    async def endless(exchange: Exchange) -> None:
        exchange.stops_when_gone = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.set()

    served.handle = endless
    async with served.client() as (_, writer):
        writer.write(GET * 2)
        await eventually(lambda: served.state.tasks)
    await asyncio.wait_for(stopped.wait(), 5)
    await eventually(lambda: not served.state.connections)


@pytest.mark.parametrize("apart", [False, True])
async def test_a_request_that_offers_an_upgrade_keeps_its_body_and_is_the_last(served: Served, apart: bool) -> None:
    """Java's client offers an upgrade by default. A body that looks like a request is not read as one."""
    async with served.client() as (reader, writer):
        writer.write(UPGRADE + b"content-length: %d\r\n\r\n" % len(GET))
        if apart:
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.write(GET + GET)
        said = await asyncio.wait_for(reader.read(), 5)
    assert (said.count(b"200 OK"), said.count(CLOSE)) == (1, 1)
    assert said.endswith(b"POST /up  %d" % len(GET))


async def test_of_many_requests_that_offer_an_upgrade_one_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = 0
    feed = RequestParser.feed

    def counting(self: RequestParser, piece: bytes) -> int:
        nonlocal fed
        fed += len(piece)
        return feed(self, piece)

    monkeypatch.setattr(RequestParser, "feed", counting)
    sent = (UPGRADE.replace(b"POST", b"GET") + b"\r\n") * 3000
    async with served.client() as (reader, writer):
        writer.write(sent)
        said = await asyncio.wait_for(reader.readuntil(b"GET /up  0"), 5)
    assert (said.count(b"200 OK"), said.count(CLOSE)) == (1, 1)
    assert fed < len(sent) / 100
