"""Replicas' answers and their results: whole answers, streams, and answers that break off."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstream import Answer, Upstream, UpstreamError
from tests.gateway.upstream.conftest import RawReplica, rest
from tests.polling import eventually


async def get(upstream: Upstream, raw: RawReplica, method: str = "GET") -> Answer:
    return await upstream.send(method, raw.url, "/v1/x?y=1", {"accept": "*/*"})


async def test_a_request_goes_out_as_it_was_given_with_the_replicas_key(raw: RawReplica, upstream: Upstream) -> None:
    answer = await get(upstream, raw)
    assert (answer.status, await rest(answer)) == (200, b"hi")
    lines = raw.heads[0].decode().split("\r\n")
    assert lines[0] == "GET /v1/x?y=1 HTTP/1.1"
    assert set(lines[1:-2]) == {f"host: {raw.url[7:]}", "accept: */*", "authorization: Bearer secret"}


async def test_a_connection_is_used_again(raw: RawReplica, upstream: Upstream) -> None:
    for _ in range(3):
        assert await rest(await get(upstream, raw)) == b"hi"
    assert raw.connections == 1


async def test_answers_at_the_same_time_have_connections_of_their_own(raw: RawReplica, upstream: Upstream) -> None:
    answers = await asyncio.gather(*(get(upstream, raw) for _ in range(5)))
    assert [await rest(answer) for answer in answers] == [b"hi"] * 5
    assert raw.connections == 5


@pytest.mark.parametrize(
    ("reply", "method", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", "GET", 200, b"until the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "GET", 204, b""),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "GET", 200, b"x"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", "HEAD", 200, b""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n", "GET", 200, b"abcd"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", "GET", 200, b"hi"),
    ],
    ids=["ended by the connection", "no content", "interim", "head", "chunked", "1.0"],
)
async def test_answers_of_every_form_are_read_to_their_end(
    raw: RawReplica, upstream: Upstream, reply: bytes, method: str, status: int, body: bytes
) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(reply)

    raw.serve = once
    answer = await get(upstream, raw, method)
    assert (answer.status, await rest(answer)) == (status, body)
    assert all(name == name.lower() for name, _ in answer.headers)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "reset"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "reset"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "reset"),
        (b"what is this\r\n\r\n", "protocol"),
        (b"HTTP/1.1 700 What\r\ncontent-length: 0\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, identity\r\n\r\nabc", "protocol"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-filler: " + b"x" * 2**20 + b"\r\n\r\n", "head_too_large"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-filler: " + b"x" * 2**22, "head_too_large"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: " + b"x" * 2**22, "head_too_large"),
    ],
    ids=[
        "nothing",
        "half a head",
        "less than announced",
        "chunks without an end",
        "no HTTP",
        "a status beyond all",
        "compressed chunks",
        "compressed chunks in two headers",
        "chunks that are not the last coding",
        "a head that is too large",
        "an endless head",
        "endless trailers",
    ],
)
async def test_an_answer_that_breaks_off_is_an_error(
    raw: RawReplica, upstream: Upstream, reply: bytes, reason: str
) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(reply)

    raw.serve = once
    with pytest.raises(UpstreamError) as failure:
        await rest(await get(upstream, raw))
    assert failure.value.reason == reason


@pytest.mark.parametrize("piece_bytes", [2**10, 2**16, 2**21])
@pytest.mark.parametrize(("size_bytes", "passes"), [(2**20 - 100, True), (2**20 + 100, False)])
async def test_the_pieces_of_a_large_head_decide_nothing(
    raw: RawReplica, upstream: Upstream, size_bytes: int, passes: bool, piece_bytes: int
) -> None:
    head = b"HTTP/1.1 200 OK\r\nmetadata: " + b"x" * size_bytes + b"\r\ncontent-length: 2\r\n\r\nhi"

    async def in_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        for at in range(0, len(head), piece_bytes):
            writer.write(head[at : at + piece_bytes])
            await asyncio.sleep(0)  # the client reads meanwhile

    raw.serve = in_pieces
    if passes:
        answer = await get(upstream, raw)
        assert (len(dict(answer.headers)[b"metadata"]), await rest(answer)) == (size_bytes, b"hi")
        assert answer.head_bytes > size_bytes
    else:
        with pytest.raises(UpstreamError, match="head_too_large: headers of more than 1048576 bytes"):
            await rest(await get(upstream, raw))


async def test_an_answer_that_is_refused_says_why(raw: RawReplica, upstream: Upstream) -> None:
    raw.reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n"
    with pytest.raises(UpstreamError, match="a transfer-encoding other than chunked"):
        await get(upstream, raw)


async def test_nobody_there_is_refused(upstream: Upstream) -> None:
    with pytest.raises(UpstreamError) as failure:
        await upstream.send("GET", "http://127.0.0.1:1", "/", {})
    assert failure.value.reason == "refused"


async def test_a_connection_that_says_something_unasked_is_not_used_again(raw: RawReplica, upstream: Upstream) -> None:
    spoke = asyncio.Event()

    async def talkative(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(raw.reply)
        await spoke.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison")
        await reader.read()

    raw.serve = talkative
    assert await rest(await get(upstream, raw)) == b"hi"
    (idle,) = upstream._origins[raw.url]._idle
    spoke.set()
    await eventually(lambda: not idle.is_open)
    raw.serve = raw._answer_each
    assert await rest(await get(upstream, raw)) == b"hi"
    assert raw.connections == 2


async def test_a_sink_that_is_full_stops_the_replica_and_loses_nothing(raw: RawReplica, upstream: Upstream) -> None:
    size = 50 * 2**20
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * 2**20)
            written += 2**20
            await writer.drain()
        await reader.read()

    raw.serve = flood
    answer = await get(upstream, raw)
    got = 0
    waits = 0

    def sink(piece: bytes) -> bool:
        nonlocal got
        got += len(piece)
        return False

    async def drained() -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            before = -1
            while before != written:  # until the replica cannot write any more
                before = written
                await asyncio.sleep(0.05)
            assert written < size

    last = await answer.relay(sink, drained)
    assert (got + len(last), waits > 1) == (size, True)


async def test_an_answer_that_is_let_go_takes_its_connection_with_it(raw: RawReplica, upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()
        gone.set()

    raw.serve = endless
    answer = await get(upstream, raw)
    assert not await answer.gathered(0, lambda _: True)
    answer.close()
    await asyncio.wait_for(gone.wait(), 5)


async def test_a_request_that_is_cancelled_takes_its_connection_with_it(raw: RawReplica, upstream: Upstream) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        asked.set()
        await reader.read()
        gone.set()

    raw.serve = silent
    task = asyncio.ensure_future(get(upstream, raw))
    await asyncio.wait_for(asked.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(gone.wait(), 5)


@pytest.mark.parametrize(
    "surplus",
    [b"HTTP/1.1 404 Not Found\r\nx: y\r\ncontent-length: 1\r\n\r\nZ", b"HTTP/1.1 404 Not Found\r\nx: y\r\n"],
    ids=["whole", "half"],
)
async def test_what_comes_behind_an_answer_is_for_nobody(raw: RawReplica, upstream: Upstream, surplus: bytes) -> None:
    async def generous(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(raw.reply + surplus)
        await reader.read()

    raw.serve = generous
    answer = await get(upstream, raw)
    assert (answer.status, await rest(answer), dict(answer.headers)) == (200, b"hi", {b"content-length": b"2"})
    raw.serve = raw._answer_each
    again = await get(upstream, raw)
    assert (again.status, await rest(again), raw.connections) == (200, b"hi", 2)


async def test_trailers_are_not_headers(raw: RawReplica, upstream: Upstream) -> None:
    raw.reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nset-this: too\r\n\r\n"
    answer = await get(upstream, raw)
    assert await rest(answer) == b"x"
    assert [name for name, _ in answer.headers] == [b"transfer-encoding"]
