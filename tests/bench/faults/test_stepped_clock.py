"""bench.faults: scripts whose clock is wrong by the offset in a key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.resources import files

import pytest
import redis

from bench.faults.stepped_clock import OFFSET_KEY, stepped
from coordinator.scripts import NAMES, source
from tests.redis_server import running_redis

HOUR_MS = 3_600_000


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with running_redis() as server, redis.Redis.from_url(server.url) as client:
        yield client


def test_scripts_read_the_time_that_the_key_says_and_the_true_time_without_it(client: redis.Redis) -> None:
    text = stepped_time() + "return now_ms()"
    true_ms = time.time() * 1000
    assert 0 <= client.eval(text, 0) - true_ms + 1 < 60_000
    client.set(OFFSET_KEY, HOUR_MS)
    assert 0 <= client.eval(text, 0) - true_ms - HOUR_MS + 1 < 60_000


def stepped_time() -> str:
    """The code that replaces lua/lib/time.lua, extracted from a script."""
    before, after = source("beat").split((files("coordinator") / "lua" / "lib" / "time.lua").read_text())
    return stepped("beat").removeprefix(before).removesuffix(after)


def test_every_script_that_reads_a_clock_reads_that_one() -> None:
    for name in NAMES:
        assert ("redis.call('TIME')" in source(name)) == (OFFSET_KEY in stepped(name)), name
