"""A Redis, two replicas that share it, and one replica alone without LMCache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from bench.vllm.printed import replica_file
from tests.forked import constants
from tests.lmcache.stage import PREFIX, TTL_SECONDS, Chunks, Replica, running
from tests.redis_server import RedisServer, running_redis

PASSWORD = "a 'pass\"word"
# As in production except for the size: Redis evicts only keys with a TTL, and LMCache has its own user (see
# docs/security.md).
USER = ("--user", "kvchunk", "on", f">{PASSWORD}", "~kvchunk@*", "-@all", "+ping", "+info", "+get", "+set", "+exists")
REDIS_OPTIONS = ("--maxmemory", "256mb", "--maxmemory-policy", "volatile-lru", *USER)
# Two workers need three rounds for the prompts of these tests.
WORKERS = {"gateway.ops.replica.sharing.WORKERS": [2]}
SHARED = {"ttl_seconds": TTL_SECONDS, "key_prefix": PREFIX}


@dataclass
class Stage:
    first: Replica
    second: Replica
    alone: Replica
    redis: RedisServer
    chunks: Chunks


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis(options=REDIS_OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def secrets(redis_server: RedisServer) -> dict[str, str]:
    """The environment variables for `kvgate replica-command` and for the commands that it prints."""
    return {"KVGATE_LMCACHE_URL": f"redis://kvchunk:{quote(PASSWORD)}@127.0.0.1:{redis_server.port}/0"}


@pytest.fixture(scope="module")
def stage(
    redis_server: RedisServer, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("replicas")
    tier = {"cpu_gb": 0.25, "redis": SHARED}
    files = [replica_file(name, redis_server.url, tier) for name in ("first", "second")]
    alone = replica_file("alone", redis_server.url, None)
    with constants(WORKERS), running(folder, *files, alone, secrets=secrets) as (first, second, alone):
        yield Stage(first, second, alone, redis_server, Chunks(redis_server))
