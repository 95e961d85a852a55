"""The watch over a real Redis: which gateway watches, what it does for chunks, and which keys it leaves alone."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import pytest
import redis.asyncio as redis
from redis.exceptions import OutOfMemoryError

from coordinator.keys import WATCHER
from coordinator.watch.store_report import read_report
from tests.coordinator.watch.stage import (
    CHUNK_TTL_S,
    MIB,
    Shared,
    holds,
    report_of,
    shared_redis,
    watching,
)
from tests.polling import eventually

pytestmark = pytest.mark.slow

LONG_TTL_S = 10 * CHUNK_TTL_S


async def ttl_of(shared: Shared, key: str) -> int:
    return int(await shared.client.ttl(key))


# -- which gateway watches ---------------------------------------------------------------------------------------------


async def test_one_watches_and_when_it_stops_another_does_at_once(shared: Shared) -> None:
    async with watching(shared.server.url, "second") as second:
        async with watching(shared.server.url, "first") as first:
            await eventually(lambda: (first.report is None) != (second.report is None))
            assert (await shared.client.get(WATCHER)).split(" ")[0] in ("first", "second")
        await eventually(lambda: second.report)
    assert not await shared.client.exists(WATCHER)


async def test_one_that_dies_is_replaced_when_its_lease_is_over(shared: Shared) -> None:
    seconds, _ = await shared.client.time()
    await shared.client.set(WATCHER, f"dead {seconds * 1000 + 1500}")
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: report_of(watcher) if watcher.report else None)
        assert (await shared.client.get(WATCHER)).startswith("gw0 ")


async def test_everybody_may_read_what_the_watcher_has_found(shared: Shared) -> None:
    async def ask(command: str, key: str) -> bytes:
        async with redis.Redis.from_url(shared.server.url, protocol=2) as client:
            return bytes(await client.execute_command(command, key) or b"")

    async def told() -> dict[str, Any]:
        return await read_report(ask)

    async with watching(shared.server.url):
        report = await eventually(told)
        assert report["watcher"] == "gw0"
        assert set(report["kinds"]) == {"coordination", "chunk", "other"}
        assert report["used_bytes"] > 0
    was = json.dumps(report).encode()
    await shared.client.set(WATCHER, b"gw0 999999999999999 " + was)
    assert (await told())["used_bytes"] == report["used_bytes"]
    await shared.client.set(WATCHER, b"gw0 1000 " + was)
    assert await told() == {}, "its watcher has gone"
    nested = b'{"kinds":{},"conditions":{},"used_bytes":' + 300 * b"[" + 300 * b"]" + b"}"
    far = b"gw0 999999999999999 "
    for garbage in (
        far + b"{}",
        far + b"[]",
        far + nested,
        far + b'{"kinds":{"a":1},"conditions":{}}',
        b"gw0 5 {",
        b"gw0 5 []",
        b"\xff",
        b"gw0 5 {}",
    ):
        await shared.client.set(WATCHER, garbage)
        assert await told() == {}


async def test_a_redis_that_hangs_or_restarts_is_watched_again(shared: Shared) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report)
        shared.server.pause()
        await eventually(lambda: watcher.report is None)
        shared.server.resume()
        await eventually(lambda: watcher.report)
        shared.server.kill()
        await eventually(lambda: watcher.report is None)
        shared.server.start()
        await eventually(lambda: watcher.report)


# -- its work for chunks -----------------------------------------------------------------------------------------------


async def test_a_chunk_without_a_ttl_is_given_one_and_nothing_else_is_touched(shared: Shared) -> None:
    others = ["user@example.com", "kvgate:pools", "order@1@0@1@paid"]
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        await shared.client.mset(dict.fromkeys(others, "x"))
        written = [await shared.store(number) for number in range(50)]
        await eventually(lambda: report_of(watcher).ttls_given == 50)
        assert all([CHUNK_TTL_S - 60 < await ttl_of(shared, key) <= CHUNK_TTL_S for key in written])
        assert holds(watcher, "chunks_without_ttl")
        await eventually(lambda: report_of(watcher).samples > 100)
    assert [await ttl_of(shared, key) for key in others] == [-1] * 3


async def test_chunks_that_were_there_before_are_found_by_chance(binary: str) -> None:
    """Redis publishes no events, so the watcher hears nothing of these chunks."""
    async with shared_redis(binary) as shared:
        before = [await shared.store(number) for number in range(50)]
        async with watching(shared.server.url) as watcher:
            await eventually(lambda: watcher.report and report_of(watcher).ttls_given == 50)
            await eventually(lambda: holds(watcher, "notifications_off"))
            assert all([await ttl_of(shared, key) > 0 for key in before])
            await shared.client.config_set("notify-keyspace-events", "E$e")
            await eventually(lambda: not holds(watcher, "notifications_off"))


async def test_no_ttl_gets_shorter_and_chunks_keep_what_they_came_with(shared: Shared) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        long = await shared.store(1, ttl_s=LONG_TTL_S)
        short = await shared.store(2, ttl_s=60)
        samples = report_of(watcher).samples
        await eventually(lambda: report_of(watcher).samples > samples + 200)
        assert await ttl_of(shared, long) > LONG_TTL_S - 60
        assert await ttl_of(shared, short) <= 60
        assert report_of(watcher).renewed == 0


async def test_a_chunk_that_is_read_outlives_its_ttl_and_one_that_nobody_reads_does_not(shared: Shared) -> None:
    life_s = 5
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        read = [await shared.store(number, ttl_s=life_s) for number in range(20)]
        unread = [await shared.store(number, ttl_s=life_s) for number in range(20, 40)]
        looked_up = [await shared.store(number, ttl_s=life_s) for number in range(40, 60)]

        async def are_gone(keys: list[str]) -> bool:
            await shared.client.mget(read)
            await shared.client.exists(*looked_up)  # LMCache does this before it loads; it is no read
            return await shared.client.exists(*keys) == 0

        await eventually(lambda: are_gone([*unread, *looked_up]), within_s=2 * life_s)
        assert await shared.client.exists(*read) == len(read)
        assert min([await ttl_of(shared, key) for key in read]) > 0
        renewed = report_of(watcher).renewed
        assert renewed >= len(read)
        # Nobody reads the chunks any more, so their renewal was useless.
        await eventually(lambda: has_none(shared, read), within_s=3 * life_s)
        assert report_of(watcher).renewed <= renewed + len(read)


async def has_none(shared: Shared, keys: list[str]) -> bool:
    return await shared.client.exists(*keys) == 0


# -- its findings ------------------------------------------------------------------------------------------------------


async def test_it_never_scans(shared: Shared) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        await shared.store(1)
        await eventually(lambda: report_of(watcher).ttls_given == 1)
        used = {name.removeprefix("cmdstat_").split("|")[0] for name in await shared.client.info("commandstats")}
    mine = {"set", "info", "config", "client", "hello", "command"}  # of this test and its client
    assert used - mine <= {
        *("evalsha", "script", "get", "time", "del", "ping", "subscribe"),
        *("randomkey", "dbsize", "memory", "object", "pttl", "pexpire"),
    }


async def test_a_full_redis_that_takes_no_lease_is_watched_all_the_same(binary: str) -> None:
    """Before Redis 7, even a lease cannot be written then. Chunks without a TTL have filled the memory."""
    async with shared_redis(binary, "--maxmemory", "32mb", "--maxmemory-policy", "volatile-lru") as shared:
        numbers = itertools.count()
        for size_bytes in (MIB, MIB // 16, MIB // 256):  # until it is completely full
            with contextlib.suppress(OutOfMemoryError):
                while True:
                    await shared.store(next(numbers), size_bytes)
        stored = await shared.client.dbsize()
        async with watching(shared.server.url) as watcher:
            await eventually(lambda: watcher.report and report_of(watcher).ttls_given > stored / 2)
        await shared.store(200, MIB)
