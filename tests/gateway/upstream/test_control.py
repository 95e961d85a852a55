"""What gateways ask replicas for themselves, and what comes of answers that are wrong."""

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
        await upstream.fetch(url, 5)
    assert failure.value.reason == "refused"
    assert failure.value.detail.startswith(why)
    assert "ssl" not in failure.value.detail


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
        await upstream.fetch(raw.url + "/metrics", 60)
    assert failure.value.reason == "protocol"
    await asyncio.wait_for(gone.wait(), 30)


async def test_compressed_answers_are_not_blown_up(raw: RawReplica, upstream: Upstream) -> None:
    bomb = gzip.compress(b"{}" * 2**20)
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb
    assert await upstream.fetch(raw.url, 60) == (200, bomb)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_json_that_would_take_long_to_parse_is_not_parsed(
    raw: RawReplica, upstream: Upstream, method: str
) -> None:
    body = b"[" + b"{}," * 2**15 + b"1]"
    raw.reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with pytest.raises(UpstreamError, match="answered JSON of more than 32768 objects and lists"):
        await (upstream.fetch_json(raw.url, 60) if method == "GET" else upstream.post_json(raw.url, {}, 60))
