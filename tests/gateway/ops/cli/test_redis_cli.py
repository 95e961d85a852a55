"""`kvgate redis-cli`: what docs show with redis-cli, on a machine without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.gateway.ops.cli.conftest import Kvgate
from tests.redis_server import RedisServer, running_redis

KEY = "kvgate:{m}:held:r0"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        client.zadd(KEY, {"a": 1, "b": 2, "c": 3})
        client.set("kvgate:title", "\x1b]0;owned\x07 mine")
        client.mset({f"other:{n}": n for n in range(3000)})
        yield server


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        (("zrange", KEY, "-2", "-1", "withscores"), ["b", "2", "c", "3"]),
        (("zcard", KEY), ["3"]),
        (("get", "nothing"), [""]),
        (("hgetall", "nothing"), [""]),
        (("get", "kvgate:title"), ["?]0;owned? mine"]),
    ],
)
def test_answers_are_printed_as_into_a_pipe_and_change_no_terminal(
    kvgate: Kvgate, server: RedisServer, typed: tuple[str, ...], lines: list[str]
) -> None:
    said = kvgate.call("redis-cli", "-u", server.url, *typed)
    assert (said.returncode, said.stdout.splitlines()) == (0, lines)


def test_a_scan_prints_each_key_of_a_pattern(kvgate: Kvgate, server: RedisServer) -> None:
    said = kvgate.call("redis-cli", "-u", server.url, "--scan", "--pattern", "kvgate:*")
    assert (said.returncode, sorted(said.stdout.splitlines())) == (0, ["kvgate:title", KEY])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("get", KEY), "WRONGTYPE"),
        (("monitor",), "needs redis-cli itself"),
        ((), "give a command"),
        (("--scan", "get"), "give a command"),
    ],
)
def test_what_redis_refuses_and_what_it_cannot_do_is_said_in_a_line(
    kvgate: Kvgate, server: RedisServer, typed: tuple[str, ...], words: str
) -> None:
    said = kvgate.call("redis-cli", "-u", server.url, *typed)
    assert (said.returncode, said.stdout, words in said.stderr) == (1, "", True)


def test_without_a_cluster_it_says_how_to_start_one(kvgate: Kvgate) -> None:
    said = kvgate.call("redis-cli", "--state-dir", str(kvgate.state_dir), "ping")
    assert (said.returncode, "no cluster is up" in said.stderr) == (1, True)


def test_a_redis_cluster_is_left_to_redis_cli(kvgate: Kvgate) -> None:
    said = kvgate.call("redis-cli", "-u", "redis+cluster://127.0.0.1:7000", "--scan")
    assert (said.returncode, "use redis-cli -c" in said.stderr) == (1, True)


def test_the_environments_redis_is_not_asked_in_the_place_of_the_clusters(kvgate: Kvgate, server: RedisServer) -> None:
    said = kvgate.call("redis-cli", "ping", env={"KVGATE_REDIS_URL": server.url})
    assert (said.returncode, "no cluster is up" in said.stderr) == (1, True)
