"""The other stores of chunks (CPU memory, Redis without CPU memory, disk), each with its own replica: the chunks that
each store holds, and the failures that it survives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.vllm.printed import replica_file
from tests.lmcache.stage import CHUNK_TOKENS, Answer, Chunks, Replica, running
from tests.redis_server import RedisServer
from tests.vllm.workload import text

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(900)]

SMALL = {"cpu_gb": 0.25}
PLAIN_CHUNK_TOKENS = 256
PROMPT_BYTES = 7500


@dataclass
class Tiers:
    cpu: Replica
    redis_only: Replica
    disk: Replica
    chunks: Chunks
    folder: Path


@pytest.fixture(scope="module")
def tiers(
    redis_server: RedisServer, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiers]:
    folder = tmp_path_factory.mktemp("tiers")
    kept = folder / "chunks"
    kept.mkdir()
    files = [
        replica_file("cpu", redis_server.url, SMALL),
        replica_file("redis-only", redis_server.url, {**SMALL, "keep_in_cpu": False, "redis": {}}),
        replica_file("disk", redis_server.url, {**SMALL, "disk": {"folder": str(kept), "size_gb": 1}}),
    ]
    with running(folder, *files, secrets=secrets) as (cpu, redis_only, disk):
        yield Tiers(cpu, redis_only, disk, Chunks(redis_server), kept)


def loaded(replica: Replica, prompt: str, first: Answer, within_s: float = 60) -> Answer:
    """The first answer that is loaded from outside the engine. LMCache stores after the answer, and an engine checks
    only now and then whether a lost server is back."""
    deadline = time.monotonic() + within_s
    while True:
        replica.forget()
        again = replica.ask(prompt)
        assert again.says_what(first)
        if again.cached_tokens > 0:
            return again
        assert time.monotonic() < deadline, again


def test_cpu_memory_survives_the_engine(tiers: Tiers) -> None:
    prompt = text("kept in CPU memory", PROMPT_BYTES)
    first = tiers.cpu.ask(prompt)
    whole = first.prompt_tokens // PLAIN_CHUNK_TOKENS * PLAIN_CHUNK_TOKENS
    assert loaded(tiers.cpu, prompt, first).cached_tokens == whole
    tiers.cpu.engine.kill()
    tiers.cpu.engine.start()
    tiers.cpu.engine.wait_until_healthy()
    assert tiers.cpu.ask(prompt).cached_tokens == whole


def test_straight_to_redis_keeps_nothing_in_cpu_memory(tiers: Tiers) -> None:
    prompt, before = text("kept in Redis alone", PROMPT_BYTES), tiers.chunks.keys()
    first = tiers.redis_only.ask(prompt)
    keys = tiers.chunks.new_since(before, first.prompt_tokens // CHUNK_TOKENS)
    assert loaded(tiers.redis_only, prompt, first).cached_tokens == len(keys) * CHUNK_TOKENS
    tiers.chunks.client.delete(*keys)
    tiers.redis_only.forget()
    gone = tiers.redis_only.ask(prompt)
    assert gone.cached_tokens == 0
    assert gone.says_what(first)


def test_a_disk_survives_a_restart_of_lmcache_and_engine(tiers: Tiers) -> None:
    """If only the server restarted, its engine might wait for minutes (configs/replica-lmcache-disk.yaml)."""
    prompt = text("kept on disk", PROMPT_BYTES)
    first = tiers.disk.ask(prompt)
    whole = first.prompt_tokens // PLAIN_CHUNK_TOKENS
    deadline = time.monotonic() + 10
    while len(list(tiers.folder.glob("*.data"))) < whole:
        assert time.monotonic() < deadline, list(tiers.folder.iterdir())
    tiers.disk.forget_cpu()
    assert loaded(tiers.disk, prompt, first).cached_tokens == whole * PLAIN_CHUNK_TOKENS
    server = tiers.disk.server
    assert server is not None
    for process in (tiers.disk.engine, server):
        process.kill()
    for process in (server, tiers.disk.engine):
        process.start()
        process.wait_until_healthy()
    again = tiers.disk.ask(prompt)
    assert again.cached_tokens == whole * PLAIN_CHUNK_TOKENS
    assert again.says_what(first)
