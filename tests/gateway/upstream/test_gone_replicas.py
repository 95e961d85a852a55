"""Connections to removed replicas: they close when no request uses them, and the gateway forgets them."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.store import Store, StoreOptions
from gateway.replicas.fleet import Fleet
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.upstream import Upstream
from tests.gateway.upstream.conftest import RawReplica, rest
from tests.polling import eventually


@pytest.fixture
def left(raw: RawReplica) -> asyncio.Event:
    """Set when the gateway closes a connection after its answer."""
    event = asyncio.Event()

    async def answer_then_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(raw.reply)
        if not await reader.read():
            event.set()

    raw.serve = answer_then_wait
    return event


async def hi(raw: RawReplica, upstream: Upstream) -> bytes:
    return await rest(await upstream.send("GET", raw.url, "/", {}))


async def test_an_idle_connection_to_a_replica_that_is_gone_is_closed(
    raw: RawReplica, upstream: Upstream, left: asyncio.Event
) -> None:
    fleet = Fleet([], Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0"), upstream)
    fleet.set_targets([ReplicaSettings(id="r0", url=raw.url)])
    assert await hi(raw, upstream) == b"hi"
    assert list(upstream._origins) == [raw.url]
    fleet.set_targets([ReplicaSettings(id="r1", url="http://127.0.0.1:1")])
    await asyncio.wait_for(left.wait(), 30)
    assert upstream._origins == {}


async def test_an_answer_of_a_replica_that_is_gone_goes_on_to_its_end(raw: RawReplica, upstream: Upstream) -> None:
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\none")
        await go_on.wait()
        writer.write(b"two")
        if not await reader.read():
            gone.set()

    raw.serve = slow
    answer = await upstream.send("GET", raw.url, "/", {})
    upstream.keep_only([])
    assert upstream._origins == {}
    go_on.set()
    assert await rest(answer) == b"onetwo"
    await asyncio.wait_for(gone.wait(), 30)


async def test_a_request_that_was_placed_before_its_replica_went_is_sent_and_leaves_nothing(
    raw: RawReplica, upstream: Upstream, left: asyncio.Event
) -> None:
    upstream.keep_only([])
    assert await hi(raw, upstream) == b"hi"
    await asyncio.wait_for(left.wait(), 30)
    assert upstream._origins == {}


async def test_connections_to_a_replica_that_comes_back_are_kept_again(raw: RawReplica, upstream: Upstream) -> None:
    upstream.keep_only([raw.url])
    assert await hi(raw, upstream) == b"hi"
    upstream.keep_only([])
    upstream.keep_only([raw.url])
    for _ in range(2):
        assert await hi(raw, upstream) == b"hi"
    await eventually(lambda: raw.connections == 2)
