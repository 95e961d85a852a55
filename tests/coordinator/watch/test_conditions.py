"""The warnings: each test causes one problem on a real Redis, and the watch reports its begin and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError
from structlog.testing import capture_logs

from tests.coordinator.watch.stage import CHUNK_TTL_S, MIB, Shared, holds, report_of, shared_redis, watching
from tests.polling import eventually


async def test_a_good_redis_with_good_chunks_gives_no_warning(shared: Shared) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        for number in range(80):
            await shared.store(number, 4 * MIB if number % 10 == 0 else MIB, CHUNK_TTL_S)
        await eventually(lambda: report_of(watcher).chunks and report_of(watcher).info.evicted_keys)
        assert set(report_of(watcher).conditions) <= {"redis_older_than_7"}


@pytest.mark.parametrize(
    ("setting", "bad", "good", "condition"),
    [
        ("maxmemory-policy", "allkeys-lru", "volatile-lru", "policy_unfit"),
        ("maxmemory-policy", "noeviction", "volatile-lru", "policy_unfit"),
        ("maxmemory", "0", "64mb", "maxmemory_unset"),
    ],
)
async def test_a_setting_that_does_not_fit_is_told_until_it_is_mended(
    shared: Shared, setting: str, bad: str, good: str, condition: str
) -> None:
    await shared.store(1, ttl_s=CHUNK_TTL_S)
    with capture_logs() as logs:
        async with watching(shared.server.url) as watcher:
            await eventually(lambda: watcher.report)
            await shared.client.config_set(setting, bad)
            await eventually(lambda: holds(watcher, condition))
            look = report_of(watcher)
            await eventually(lambda: watcher.report is not look)
            await shared.client.config_set(setting, good)
            await eventually(lambda: not holds(watcher, condition))
    assert told(logs, condition) == ["store trouble", "store trouble over"]


def told(logs: list[Any], condition: str) -> list[str]:
    return [line["event"] for line in logs if line.get("condition") == condition]


async def test_without_chunks_a_redis_needs_no_limit(binary: str) -> None:
    async with shared_redis(binary) as shared, watching(shared.server.url) as watcher:
        await shared.client.set("kvgate:pools", "x")
        await eventually(lambda: watcher.report)
        assert set(report_of(watcher).conditions) <= {"redis_older_than_7"}


async def test_an_old_redis_is_told(shared: Shared) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report)
        assert holds(watcher, "redis_older_than_7") == (shared.version < 7)


async def test_chunks_that_are_too_large_are_told(shared: Shared) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        await shared.store(1, 14 * MIB, CHUNK_TTL_S)
        await eventually(lambda: holds(watcher, "chunks_too_large"))
        assert report_of(watcher).largest_chunk_bytes > 14 * MIB


async def test_a_memory_full_of_what_cannot_be_evicted_is_told_before_and_while_writes_are_refused(
    shared: Shared,
) -> None:
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report)
        for number in itertools.count():
            await shared.client.set(f"other:{number}", bytes(MIB // 4))
            if (await shared.client.info("memory"))["used_memory"] > 60 * MIB:
                break
        await eventually(lambda: holds(watcher, "nothing_to_evict"))
        assert not holds(watcher, "writes_refused")
        with contextlib.suppress(OutOfMemoryError):
            for number in range(100):
                await shared.client.set(f"more:{number}", bytes(MIB))
        await eventually(lambda: holds(watcher, "writes_refused"))
        assert report_of(watcher).info.refused_writes > 0


async def test_coordination_that_takes_half_of_the_memory_is_told(shared: Shared) -> None:
    await shared.client.mset({f"kvgate:{{m}}:{number}": bytes(MIB) for number in range(40)})
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: holds(watcher, "coordination_large"))
        await shared.client.flushdb()
        await eventually(lambda: not holds(watcher, "coordination_large"), within_s=60)


async def test_coordination_that_is_evicted_is_told(shared: Shared) -> None:
    await shared.client.config_set("maxmemory-policy", "allkeys-lru")
    await shared.client.mset({f"kvgate:{{m}}:{number}": "x" for number in range(200)})
    async with watching(shared.server.url) as watcher:
        await eventually(lambda: watcher.report and report_of(watcher).hears)
        await asyncio.sleep(1.1)  # Redis evicts the keys unused for longest, by a clock in seconds
        for number in range(100):
            await shared.store(number, MIB, CHUNK_TTL_S)
        await eventually(lambda: holds(watcher, "coordination_evicted"))
        assert report_of(watcher).evicted["coordination"] > 0


@pytest.mark.parametrize(
    ("denied", "said"),
    [("-randomkey", "randomkey"), ("-memory", "memory"), ("-pttl", "pttl"), ("-subscribe", "subscribe")],
)
async def test_a_user_who_may_not_do_all_of_it_does_the_rest_and_says_so(
    shared: Shared, denied: str, said: str
) -> None:
    await shared.store(1)
    await shared.client.execute_command("ACL", "SETUSER", "kvgate", "on", ">secret", "~*", "&*", "+@all", denied)
    url = shared.server.url.replace("redis://", "redis://kvgate:secret@")
    async with watching(url) as watcher:
        await eventually(lambda: holds(watcher, "not_permitted"))
        assert said in report_of(watcher).conditions["not_permitted"]
        assert report_of(watcher).info.used_bytes > 0


async def test_a_user_without_info_watches_nothing_and_leaves_it_to_others(shared: Shared) -> None:
    await shared.client.execute_command("ACL", "SETUSER", "kvgate", "on", ">secret", "~*", "&*", "+@all", "-info")
    url = shared.server.url.replace("redis://", "redis://kvgate:secret@")
    with capture_logs() as logs:
        async with watching(url, "blind") as blind:
            await eventually(lambda: any("info" in line.get("reason", "") for line in logs))
            async with watching(shared.server.url, "sighted") as sighted:
                await eventually(lambda: sighted.report)
                assert blind.report is None
