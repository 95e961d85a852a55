"""The scripts' contract: header, body and Python wrapper agree, every file is shipped, and a flushed cache heals."""

from __future__ import annotations

import asyncio
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis.asyncio as redis

import coordinator
from coordinator.keys import WATCHER
from coordinator.scripts import NAMES, PolicyKnobs, load, source
from tests.coordinator.stage import chain, drained, joined, numbers, place, register
from tests.coordinator.wrappers import ARGUMENTS, CHUNK, wrapper_calls
from tests.redis_server import RedisServer

FOLDER = Path(coordinator.__file__).parent
LUA = FOLDER / "lua"


@dataclass
class Header:
    """What a script's opening comment declares: names by index, and where an open-ended rest begins."""

    names: dict[int, str] = field(default_factory=dict)
    rest: int | None = None


def headers(name: str) -> dict[str, Header]:
    comment = re.match(r"(?:--.*\n)+", source(name))
    assert comment is not None
    found = {"KEYS": Header(), "ARGV": Header()}
    for array, index, rest, text in re.findall(r"(KEYS|ARGV)\[(\d+)(\.\.)?\] (\S.*?)(?=   |\n|$)", comment[0]):
        if rest:
            found[array].rest = int(index)
        else:
            found[array].names.setdefault(int(index), re.split(r"[(;,]|: ", text)[0].strip())
    return found


def uses(name: str, array: str) -> tuple[set[int], bool]:
    """The literal indices in the body, and whether an open-ended rest is read."""
    body = re.sub(r"--.*", "", source(name))
    indices = re.findall(rf"{array}\[([^\]]+)\]", body)
    literal = {int(index) for index in indices if index.isdigit()}
    return literal, any(not index.isdigit() for index in indices) or f"#{array}" in body


def test_every_lua_file_is_a_known_script() -> None:
    assert sorted(file.stem for file in LUA.glob("*.lua")) == sorted(NAMES)


@pytest.mark.parametrize("array", ["KEYS", "ARGV"])
@pytest.mark.parametrize("name", NAMES)
def test_a_header_lists_exactly_what_the_body_reads(name: str, array: str) -> None:
    header = headers(name)[array]
    literal, reads_rest = uses(name, array)
    assert set(header.names) == literal
    assert sorted(header.names) == list(range(1, len(header.names) + 1))
    assert (header.rest is not None) == reads_rest
    assert header.rest in (None, len(header.names) + 1)


def test_the_places_where_chains_begin_are_those_of_the_header_of_place() -> None:
    declared = re.search(r"local FIRST_OWN, FIRST_TOKENS\b.*= (\d+), (\d+)", source("place"))
    assert declared is not None
    assert [int(n) for n in declared.groups()] == [headers("place")["KEYS"].rest, headers("place")["ARGV"].rest]


@pytest.mark.parametrize("name", NAMES)
async def test_the_wrapper_passes_what_the_header_lists(name: str) -> None:
    keys, args = (await wrapper_calls())[name]
    assert args == ARGUMENTS[name]
    header = headers(name)
    for array, sent in (("KEYS", keys), ("ARGV", args)):
        fixed = len(header[array].names)
        assert len(sent) == fixed if header[array].rest is None else len(sent) >= fixed
    declared = [header["KEYS"].names[i] for i in sorted(header["KEYS"].names)]
    for key, sent_key in zip(declared, keys, strict=False):
        pool = "" if sent_key == WATCHER else r"\{m\}:"
        assert re.fullmatch(f"kvgate:{pool}" + re.sub(r"<\w+>", "[^:]+", key), sent_key)
    beyond = {key.split(":")[2] for key in keys[len(declared) :] if key != CHUNK}
    assert beyond <= ({"own", "flight"} if name == "sweep" else {"own"})


def test_the_knobs_are_named_in_the_header_of_place() -> None:
    names = headers("place")["ARGV"].names
    fields = [name for name in PolicyKnobs.__dataclass_fields__ if name != "name"]
    assert [names[i] for i in (*range(12, 20), 22, 25)] == fields


async def test_every_script_loads(client: redis.Redis) -> None:
    info = await client.info("server")
    allow_oom = int(info["redis_version"].split(".")[0]) >= 7
    for name in NAMES:
        script = load(name, allow_oom)
        assert await client.script_load(script.text) == script.sha


async def test_a_flushed_script_cache_is_not_noticed(redis_server: RedisServer, client: redis.Redis) -> None:
    async with joined(redis_server.url) as pool:
        await register(pool, 2)
        await place(pool, "a", chain(1))
        await client.script_flush()
        await place(pool, "b", chain(1))
        await client.script_flush()
        pool.first_token("a")
        pool.done("b")
        await drained(pool)
        assert sum((await numbers(client, pool.keys.active)).values()) == 1
        assert await numbers(client, pool.keys.backlog_tokens) == {}


async def test_placements_of_one_turn_survive_a_flushed_cache_each_with_its_own_reply(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with joined(redis_server.url) as pool:
        await register(pool, 3)
        await client.script_flush()
        placed = await asyncio.gather(*(place(pool, f"id{i}", chain(i), pinned=f"r{i % 3}") for i in range(30)))
        assert [one.replica for one in placed] == [f"r{i % 3}" for i in range(30)]
        flight = await client.hgetall(pool.keys.flight("gw0"))
        assert {name: entry.split(" ")[0] for name, entry in flight.items()} == {
            f"id{i}": f"r{i % 3}" for i in range(30)
        }


async def test_a_reassertion_never_comes_behind_a_settlement_that_followed_it(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """After SCRIPT FLUSH another gateway's settlements load `settle` again, but nobody loads `reassert`: if the
    statement of live requests had to be sent twice, it would bring back one that was settled in between."""
    async with joined(redis_server.url) as pool, joined(redis_server.url, "gw1") as other:
        await register(pool, 1)
        await place(pool, "a", chain(1))
        await place(other, "b", chain(2))
        await client.script_flush()
        other.done("b")
        await drained(other)
        pool.reassert()
        pool.done("a")
        await drained(pool)
        assert await client.hgetall(pool.keys.flight("gw0")) == {}
        assert await numbers(client, pool.keys.active) == {}


def test_the_wheel_ships_every_file_that_the_package_reads() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["coordinator"]
    shipped = {file for pattern in patterns for file in FOLDER.glob(pattern)}
    assert {*FOLDER.rglob("*.lua"), FOLDER / "README.md"} <= shipped


def test_the_shebang_is_only_sent_where_scripts_have_flags() -> None:
    plain, flagged = load("place", allow_oom=False), load("place", allow_oom=True)
    assert not plain.text.startswith("#!")
    assert flagged.text == "#!lua flags=allow-oom\n" + plain.text
    assert flagged.sha != plain.sha
