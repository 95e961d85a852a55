"""The gateways' own requests to replicas, and the effect of wrong answers."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from gateway.upstream import Upstream, UpstreamError
from tests.gateway.upstream.conftest import RawReplica


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "cannot connect to 127.0.0.1:1 (connection refused)"),
        ("http://nobody.invalid:1", "cannot connect to nobody.invalid:1 ("),
    ],
)
async def test_a_question_that_reaches_nobody_says_why_in_plain_words(upstream: Upstream, url: str, why: str) -> None:
    with pytest.raises(UpstreamError) as failure:
        await upstream.get(url, "/health", 5)
    assert failure.value.reason == "refused"
    assert failure.value.detail.startswith(why)
    assert "ssl" not in failure.value.detail


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0..7:8000",
        "http://h:99999",
        "http://h:port",
        "http://[::1",
        f"http://{64 * 'x'}.example",
        "http://",
    ],
)
async def test_a_url_that_nobody_can_connect_to_is_a_refusal_like_any_other(upstream: Upstream, url: str) -> None:
    """Such a URL may stand in a replica's record in Redis."""
    with pytest.raises(UpstreamError) as failure:
        await upstream.get(url, "/health", 5)
    assert failure.value.reason == "refused"
    with pytest.raises(UpstreamError) as failure:
        await upstream.send("POST", url, "/v1/chat/completions", {}, [b"{}"])
    assert failure.value.reason == "refused"


async def test_a_base_path_of_any_letters_is_quoted(raw: RawReplica, upstream: Upstream) -> None:
    await upstream.get(f"{raw.url}/modèle%20a/", "/health", 60)
    assert raw.heads[0].startswith(b"GET /mod%C3%A8le%20a/health HTTP/1.1")


async def test_an_answer_without_an_end_is_given_up(raw: RawReplica, upstream: Upstream) -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 2**16)
                await writer.drain()
        except ConnectionError:
            gone.set()

    raw.serve = endless
    with pytest.raises(UpstreamError, match=r"GET http.*/metrics answered more than 2097152 bytes") as failure:
        await upstream.get(raw.url, "/metrics", 60)
    assert failure.value.reason == "protocol"
    await asyncio.wait_for(gone.wait(), 30)


async def test_compressed_answers_are_not_blown_up(raw: RawReplica, upstream: Upstream) -> None:
    bomb = gzip.compress(b"{}" * 2**20)
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb
    assert await upstream.get(raw.url, "/metrics", 60) == (200, bomb)


async def test_json_that_would_take_long_to_parse_is_not_parsed(raw: RawReplica, upstream: Upstream) -> None:
    body = b"[" + b"{}," * 2**15 + b"1]"
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with pytest.raises(UpstreamError, match="answered JSON of more than 32768 objects and lists"):
        await upstream.get_json(raw.url, "/v1/models", 60)


async def test_an_idle_connection_that_the_replica_closes_meanwhile_is_no_failure(
    raw: RawReplica, upstream: Upstream
) -> None:
    raw.serve = raw.answer_once
    assert (await upstream.get(raw.url, "/health", 60)).status == 200
    assert (await upstream.get(raw.url, "/health", 60)).status == 200
    assert raw.connections == 2


async def test_a_replica_that_does_not_answer_is_late(raw: RawReplica, upstream: Upstream) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    raw.serve = silent
    with pytest.raises(UpstreamError, match=r"timeout: http.*/health did not answer within 0.1 s"):
        await upstream.get(raw.url, "/health", 0.1)


async def test_the_key_goes_only_to_replicas_that_may_have_it(raw: RawReplica, upstream: Upstream) -> None:
    await upstream.get(raw.url, "/health", 60)
    await upstream.get(raw.url, "/health", 60, with_key=False)
    assert [b"secret" in head for head in raw.heads] == [True, False]
