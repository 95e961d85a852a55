"""Valid URLs of a store, and the server that each URL leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coordinator.errors import StoreDown
from coordinator.redis.address import check_url, connect, is_cluster
from gateway.ops.local.ports import free_ports
from tests.redis_groups import client_of, end, sentinel_config
from tests.redis_server import EACH_REDIS, RedisServer, default_server, running_redis, server_named


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h/mymaster",
        "redis+sentinel://h:26379,[::1]:1,other/my-master/3?sentinel_password=p%40ss&health_check_interval=5",
        "rediss+sentinel://user:p%40ss@h:26379/mymaster?ssl_ca_certs=ca.pem",
        "redis+cluster://h",
        "redis+cluster://user:secret@h:6379,h2:6380/0",
        "rediss+cluster://[::1]:6379/",
    ],
)
def test_several_servers_are_an_address(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("redis+sentinel://h:26379", "names no master; write what the sentinels call it"),
        ("redis+sentinel://h:26379/m/zero", "names no master; write"),
        ("redis+sentinel:///mymaster", "names no server; write host:port"),
        ("redis+sentinel://h,,h2/mymaster", "names no server; write host:port"),
        ("redis+sentinel://h:99999/mymaster", "names no server; write host:port"),
        ("redis+sentinel://h/m?socket_timout=1", "see its options after the question mark"),
        ("redis+cluster://h/3", "leave /3 out"),
        ("redis+cluster://", "names no server; write host:port"),
        ("redis+cluster://h?socket_timeout=soon", "see its options after the question mark"),
        ("sentinel://h/m", "redis+sentinel://"),
        ("redis://h1,h2", "names no server; write host:port"),
        ("redis+cluster://[::1", "is no URL"),
    ],
)
def test_what_is_none_says_how_to_write_one(url: str, fix: str) -> None:
    with pytest.raises(StoreDown) as caught:
        check_url(url)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa@secret#word@127.0.0.1:6379/0",
        "redis://:secret#@127.0.0.1:6379/0",
        "redis://:pa@secret@127.0.0.1:6379/0",
        "redis://user:12/secret@127.0.0.1:6379/0",
        "redis://:[secret@127.0.0.1:6379/0",
        "unix://:pa@secret@/run/redis.sock",
        "redis+sentinel://:pa@secret@h:26379/mymaster",
        "redis+cluster://h:6379?password=secret#word",
    ],
)
def test_a_password_that_is_not_encoded_is_refused_and_no_part_of_it_told(url: str) -> None:
    with pytest.raises(StoreDown) as caught:
        check_url(url)
    assert "percent-encode" in str(caught.value)
    assert "secret" not in str(caught.value)


@contextmanager
def sentinels(binary: str, folder: Path, *masters: tuple[int, str]) -> Iterator[list[RedisServer]]:
    """Starts one sentinel for each (port of the master that it names, more configuration). They do not know each
    other."""
    with ExitStack() as stack:
        started = []
        for port, (master_port, more) in zip(free_ports(len(masters)), masters, strict=True):
            (home := folder / str(port)).mkdir()
            file = home / "sentinel.conf"
            file.write_text(sentinel_config(port, master_port, home) + more)
            started.append(RedisServer(port, [binary, str(file), "--sentinel"]))
            stack.callback(end, started[-1])
        yield started


def url_of(asked: list[RedisServer], rest: str, login: str = "") -> str:
    return f"redis+sentinel://{login}{','.join(f'127.0.0.1:{one.port}' for one in asked)}/{rest}"


async def port_at(url: str) -> int:
    """The port of the server to which the URL leads."""
    wire = await connect(url, "kvgate:pools", 2.0, lambda _error: None)
    try:
        return int((await wire.send("CONFIG", "GET", "port"))[1])
    finally:
        await wire.close()


@pytest.mark.parametrize("name", EACH_REDIS)
async def test_of_sentinels_that_contradict_each_other_the_newest_word_counts(name: str, tmp_path: Path) -> None:
    """A sentinel that was away for a while still names the old master. The old master still believes that it is one."""
    binary = server_named(name)
    with running_redis(binary) as old, running_redis(binary) as new:
        newer = (new.port, "sentinel config-epoch the-master 7\n")
        with sentinels(binary, tmp_path, (old.port, ""), newer, (old.port, "")) as asked:
            assert await port_at(url_of(asked, "the-master")) == new.port
            asked[1].kill()
            assert await port_at(url_of(asked, "the-master")) == old.port


@pytest.mark.parametrize("name", EACH_REDIS)
async def test_sentinels_and_the_master_have_passwords_of_their_own(name: str, tmp_path: Path) -> None:
    binary = server_named(name)
    with running_redis(binary, ("--requirepass", "of-the-master")) as master:
        known = "requirepass of-the-sentinel\nsentinel auth-pass the-master of-the-master\n"
        with sentinels(binary, tmp_path, (master.port, known)) as asked:
            url = url_of(asked, "the-master/0?sentinel_password=of-the-sentinel", ":of-the-master@")
            assert await port_at(url) == master.port
            with pytest.raises(StoreDown, match="no sentinel names a master 'the-master'") as caught:
                await port_at(url.replace("=of-the-", "=guessed-"))
            assert "guessed" not in str(caught.value)


@pytest.mark.parametrize("name", EACH_REDIS)
async def test_who_the_sentinels_name_must_be_a_master(name: str, tmp_path: Path) -> None:
    binary = server_named(name)
    with running_redis(binary) as master, running_redis(binary) as replica:
        with client_of(replica) as client:
            client.replicaof("127.0.0.1", master.port)
        with (
            sentinels(binary, tmp_path, (replica.port, "")) as asked,
            pytest.raises(StoreDown, match="the sentinels name a server whose role is slave"),
        ):
            await port_at(url_of(asked, "the-master"))


async def test_when_nobody_answers_or_knows_the_master_each_says_why(tmp_path: Path) -> None:
    binary = default_server()
    with running_redis(binary) as master, sentinels(binary, tmp_path, (master.port, ""), (master.port, "")) as asked:
        asked[1].pause()
        with pytest.raises(StoreDown) as caught:
            await port_at(url_of(asked, "another"))
        assert f"127.0.0.1:{asked[0].port}: ERR No such master with that name" in str(caught.value)
        assert f"127.0.0.1:{asked[1].port}: " in str(caught.value)


async def test_a_server_that_is_no_cluster_says_so(tmp_path: Path) -> None:
    with running_redis() as single, pytest.raises(StoreDown, match="cluster support disabled"):
        await port_at(f"redis+cluster://127.0.0.1:{single.port}")


async def test_whenever_opening_is_cancelled_it_is_cancelled(redis_server: RedisServer) -> None:
    """Otherwise a gateway that ends while it reconnects would never end."""
    turns = 0
    while True:
        opening = asyncio.get_running_loop().create_task(connect(redis_server.url, "k", 5.0, lambda _: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        if opening.done():
            break
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        turns += 1
    await opening.result().close()
    assert turns > 5


@pytest.mark.parametrize("url", ["redis+cluster://h,[::1]:1", "REDISS+CLUSTER://user:p%40ss@[::1]:1,h2/0"])
def test_a_cluster_is_told_by_its_scheme(url: str) -> None:
    assert is_cluster(url)
    assert not is_cluster(url.lower().replace("cluster", "sentinel"))
