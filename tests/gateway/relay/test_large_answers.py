"""Answers without streaming: the gateway collects small answers, relays large ones as they arrive, and counts all of
them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from gateway.relay import relay, stored_objects
from tests.gateway.relay.conftest import Pair
from tests.gateway.scripted import ASKED, CHAT, Relayed, chunk, head, whole
from tests.polling import eventually

MIB = 2**20
CHUNKED = ("content-type: application/json", "transfer-encoding: chunked")
USAGE = b'"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}'


def document(size_bytes: int) -> bytes:
    """An answer of about this size. Its usage is at the end, as engines write it."""
    return b'{"id":"resp_1","data":[' + b"{}," * (size_bytes // 3) + b"{}]," + USAGE + b"}"


def prompt_tokens(relayed: Relayed) -> bool:
    """Whether the gateway has read the usage of exactly one answer."""
    return 'kvgate_prompt_tokens_total{replica="r0"} 7.0' in relayed.gateway.metrics.exposition().decode()


async def read_while_it_comes(relayed: Relayed, go_on: asyncio.Event) -> tuple[httpx.Response, bytes]:
    """An answer and its body. The replica sends the rest only after the client has the first piece."""
    async with relayed.http.stream("POST", CHAT, json=ASKED) as answer:
        pieces = answer.aiter_bytes()
        got = await anext(pieces)
        go_on.set()
        async for piece in pieces:
            got += piece
    return answer, got


@pytest.mark.parametrize("media_type", ["audio/pcm", "application/x-ndjson", "", "text/plain; charset=utf-8"])
async def test_what_is_made_piece_by_piece_reaches_its_client_piece_by_piece(relayed: Relayed, media_type: str) -> None:
    go_on = asyncio.Event()
    headers = ("transfer-encoding: chunked", *([f"content-type: {media_type}"] if media_type else []))
    relayed.replica.says(head(*headers) + chunk(b"one\n"), go_on, chunk(b"two\n") + chunk(b""))
    answer, got = await read_while_it_comes(relayed, go_on)
    assert (answer.status_code, got) == (200, b"one\ntwo\n")


@pytest.mark.parametrize("media_type", ["application/json", "application/problem+json; charset=utf-8"])
async def test_json_in_chunks_is_complete_before_it_is_sent(pair: Pair, media_type: str) -> None:
    broken = head(f"content-type: {media_type}", "transfer-encoding: chunked") + chunk(b'{"choices":')
    pair.replicas[0].says(broken)
    pair.replicas[1].says(broken)
    assert (await pair.http.post(CHAT, json=ASKED)).status_code == 502
    assert pair.asked == 2, "another replica was asked"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["of known length", "chunked"])
async def test_a_large_answer_reaches_its_client_before_it_is_complete(relayed: Relayed, is_chunked: bool) -> None:
    body, go_on = document(3 * MIB), asyncio.Event()
    first, second = body[: 2 * MIB], body[2 * MIB :]
    if is_chunked:
        relayed.replica.says(head(*CHUNKED) + chunk(first), go_on, chunk(second) + chunk(b""))
    else:
        relayed.replica.says(head(f"content-length: {len(body)}") + first, go_on, second)
    answer, got = await read_while_it_comes(relayed, go_on)
    assert got == body
    assert answer.headers.get("content-length") == (None if is_chunked else str(len(body)))
    assert prompt_tokens(relayed)
    assert relayed.gateway.admission.held_bytes.taken == 0
    assert (await relayed.ask()).status_code == 200, "its connection can be used again"


async def test_what_is_gathered_is_counted_until_its_client_has_it(relayed: Relayed) -> None:
    body, go_on = document(MIB // 2), asyncio.Event()
    relayed.replica.says(head(f"content-length: {len(body)}") + body[:-10], go_on, body[-10:])
    asked = asyncio.ensure_future(relayed.ask())
    await eventually(lambda: relayed.gateway.admission.held_bytes.taken >= len(body) - 10)
    go_on.set()
    answer = await asked
    assert (answer.content, answer.headers["content-length"]) == (body, str(len(body)))
    await eventually(lambda: relayed.gateway.admission.held_bytes.taken == 0)
    assert prompt_tokens(relayed)


@pytest.mark.parametrize("relayed", [{"limits": {"max_buffered_bytes": 2**14}}], indirect=True)
async def test_where_there_is_no_room_an_answer_is_relayed_from_where_it_stands(relayed: Relayed) -> None:
    body, go_on = document(2**16), asyncio.Event()
    relayed.replica.says(head(f"content-length: {len(body)}") + body[:-10], go_on, body[-10:])
    _, got = await read_while_it_comes(relayed, go_on)
    assert got == body
    assert prompt_tokens(relayed)


@pytest.mark.parametrize(
    "pieces",
    [
        (head(f"content-length: {4 * MIB}"), b"x" * 3 * MIB),
        (head(*CHUNKED), chunk(b"x" * 3 * MIB)),
    ],
    ids=["of known length", "chunked"],
)
async def test_a_large_answer_that_breaks_off_is_cut_and_not_tried_again(
    relayed: Relayed, pieces: tuple[bytes, ...]
) -> None:
    relayed.replica.says(*pieces)
    with pytest.raises(httpx.TransportError):
        await relayed.ask()
    assert relayed.replica.asked == 1
    assert "kvgate_broken_streams_total 1.0" in relayed.gateway.metrics.exposition().decode()
    assert relayed.gateway.admission.held_bytes.taken == 0


async def test_to_http_1_0_the_end_of_a_broken_answer_is_no_clean_end(relayed: Relayed) -> None:
    relayed.replica.says(head(*CHUNKED), chunk(b"x" * 3 * MIB))
    address = urlsplit(str(relayed.http.base_url))
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = orjson.dumps(ASKED)
    writer.write(b"POST %b HTTP/1.0\r\ncontent-type: application/json\r\n" % CHAT.encode())
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    assert b"content-length" not in await reader.readuntil(b"\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "relayed",
    [
        {"timeouts": {"first_byte_s": 1, "request_s": 1}},
        {"timeouts": {"idle_s": 0.1}},
    ],
    ids=["time of a request", "idle time"],
    indirect=True,
)
async def test_a_large_answer_whose_time_is_over_is_cut(relayed: Relayed) -> None:
    relayed.replica.says(head(f"content-length: {4 * MIB}"), b"x" * 3 * MIB, asyncio.Event())
    with pytest.raises(httpx.TransportError):
        await relayed.ask()
    assert relayed.gateway.admission.held_bytes.taken == 0


async def test_a_client_that_does_not_read_holds_its_replica_back_and_what_waits_for_it_is_counted(
    relayed: Relayed,
) -> None:
    size, written = 64 * MIB, 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(head(f"content-length: {size}"))
        while written < size:
            writer.write(b"x" * MIB)
            written += MIB
            await writer.drain()

    relayed.replica.answer = flood
    async with relayed.http.stream("POST", CHAT, json=ASKED) as answer:
        before = -1
        while before != written:  # until nobody reads any more
            before = written
            await asyncio.sleep(0.1)
        assert written < size
        assert relayed.gateway.admission.held_bytes.taken > 2**16
        assert sum([len(piece) async for piece in answer.aiter_raw()]) == size
    await eventually(lambda: relayed.gateway.admission.held_bytes.taken == 0)


@pytest.mark.parametrize("status", [429, 500])
async def test_an_error_answer_that_is_too_large_is_not_kept(relayed: Relayed, status: int) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(head(*CHUNKED, status=status))
        while True:
            writer.write(chunk(b"x" * 2**16))
            await writer.drain()

    relayed.replica.answer = endless
    answer = await relayed.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_unreachable")
    await asyncio.wait_for(relayed.replica.hung_up.wait(), 30)
    assert relayed.gateway.admission.held_bytes.taken == 0


async def test_large_headers_reach_the_client_and_count_as_held(relayed: Relayed) -> None:
    metadata, go_on = "m" * (MIB // 2), asyncio.Event()
    relayed.replica.says(head("content-length: 2", f"metadata: {metadata}") + b"h", go_on, b"i")
    address = urlsplit(str(relayed.http.base_url))
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=MIB)
    body = orjson.dumps(ASKED)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % CHAT.encode())
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    await eventually(lambda: relayed.gateway.admission.held_bytes.taken > MIB // 2)
    go_on.set()
    assert f"metadata: {metadata}\r\n".encode() in await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(2) == b"hi"
    writer.close()
    await eventually(lambda: relayed.gateway.admission.held_bytes.taken == 0)


async def test_of_answers_over_64_kib_usage_and_id_are_read_without_parsing_them(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    remembered: list[str] = []

    def noted(data: bytes) -> object:
        parsed.append(len(data))
        return orjson.loads(data)

    monkeypatch.setattr(relay, "orjson", SimpleNamespace(**{**vars(orjson), "loads": noted}))
    monkeypatch.setattr(stored_objects.object_owners, "remember", lambda _pool, name, *_: remembered.append(name))
    for size in (2**17, 2 * MIB):
        relayed.replica.says(whole(document(size)))
        asked: dict[str, Any] = {"model": "m", "input": "Hello, " * 1000}
        assert (await relayed.http.post("/v1/responses", json=asked)).content == document(size)
    assert (parsed, remembered) == ([], ["resp_1", "resp_1"])
    assert 'kvgate_prompt_tokens_total{replica="r0"} 14.0' in relayed.gateway.metrics.exposition().decode()
    relayed.replica.says(whole(document(2**15)))
    await relayed.ask()
    assert parsed == [len(document(2**15))]
