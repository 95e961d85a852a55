"""The scripts' contract: bodies and callers follow the headers, the wheel contains every file, and calls survive SCRIPT
FLUSH."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

import coordinator
from coordinator.keys import WATCHER, audit_key, decision_ring_key, records_key, usage_key
from coordinator.scripts import NAMES, as_function, load, local_line, signature, source
from tests.coordinator.stage import KEYS, chain, drained, joined, numbers, place, register
from tests.coordinator.wrappers import ARGUMENTS, CHUNK, wrapper_calls
from tests.redis_server import RedisServer

FOLDER = Path(coordinator.__file__).parent
LUA = FOLDER / "lua"
README = FOLDER / "README.md"


def body(name: str) -> str:
    """A script's own code and its includes, without comments, without the locals that its header defines, and without
    `place` as a function or as a whole."""
    text = source(name).replace(as_function("place"), "").replace(local_line(name), "")
    return re.sub(r"--.*", "", text if name == "place" else text.replace(source("place"), ""))


@pytest.mark.parametrize("name", NAMES)
def test_a_body_reads_every_value_by_the_name_that_its_header_declares(name: str) -> None:
    code = body(name)
    assert not re.search(r"(KEYS|ARGV)\[\d+\]|\((KEYS|ARGV), *\d", code)
    names = re.findall(r"[\w]+", " ".join(re.findall(r"local (?!function)(.*?) =", local_line(name))))
    unused = [one for one in names if not re.search(rf"\b{one}\b", code)]
    assert set(unused) <= {"turn_key", "PLACING_OFFSET", "ARGUMENTS_OFFSET"}, (
        "for round_robin, and for place as a whole"
    )
    redefined = [one for one in names if re.search(rf"^local (function )?([\w, ]+, )?{one}\b", code, re.MULTILINE)]
    assert redefined == []


@pytest.mark.parametrize("name", NAMES)
def test_lines_keep_their_numbers_up_to_the_first_include(name: str) -> None:
    lines = (LUA / f"{name}.lua").read_text().splitlines()
    assert lines[lines.index("") - 1].startswith("--"), "the header, and behind it the line in which the locals come"
    first = next((at for at, line in enumerate(lines) if line.startswith("-- include")), len(lines))
    expected = [local_line(name) if at == lines.index("") else line for at, line in enumerate(lines[:first])]
    assert list(map(_without_numbers, source(name).splitlines()[:first])) == list(map(_without_numbers, expected))


def _without_numbers(line: str) -> str:
    """A line of Lua without numbers, their names, and what defines these."""
    return re.sub(r"^local (?=[A-Z])|\b[A-Z][A-Z_]+\b|[\d.(),=* ]", "", line)


@pytest.mark.parametrize("name", NAMES)
async def test_a_script_can_grow_by_twenty_locals(client: redis.Redis, name: str) -> None:
    """A function of Redis' Lua has 200 at most."""
    more = " ".join(f"local more_{number}" for number in range(20))
    await client.script_load(f"{more} {source(name)}")


@pytest.mark.parametrize("name", NAMES)
def test_a_script_has_the_functions_of_the_includes_that_it_calls_and_no_others(name: str) -> None:
    code = body(name)
    library = "".join(file.read_text() for file in (LUA / "lib").iterdir())
    for function in re.findall(r"^ *local function (\w+)", library, re.MULTILINE):
        made = len(re.findall(rf"function {function}\(", code))
        named = len(re.findall(rf"(?<![\w.]){function}\(", code))
        assert named == 0 if made == 0 else named > made, f"{function} is made {made} times and named {named} times"


@pytest.mark.parametrize("name", NAMES)
def test_headers_name_keys_of_the_data_model_with_their_types(name: str) -> None:
    base = r"kvgate:(?:\{m\}:|usage\{usage\}:(?=\w))?"
    rows = re.findall(
        rf"^\| `{base}(\w+)(?:\{{\w+\}})?(?::<\w+>)?` \| ([A-Z]+) ", README.read_text(), flags=re.MULTILINE
    )
    types = {key: kind.lower() for key, kind in rows} | {"chunks": "string"}  # LMCache's keys
    types |= {"placing": "hash", "slots": "hash"}  # those of place; of the ring
    assert {key.name: key.kind for key in signature(name).keys} == {
        key.name: types[key.name] for key in signature(name).keys
    }


@pytest.mark.parametrize("name", NAMES)
async def test_callers_pass_what_a_script_must_receive(name: str) -> None:
    keys, args = (await wrapper_calls())[name]
    assert args == ARGUMENTS[name]
    declared, patterns = signature(name).keys, []
    for key in declared:
        spelled = f"kvgate:{{m}}:{key.name}" + (":[^:]+" if key.of else "")
        others = {"watcher": WATCHER, "chunks": CHUNK, "tenants": KEYS.tenants}
        others |= {"placing": r"kvgate:.*"}
        others |= {"records": records_key(), "audit": audit_key(), "usage": usage_key()}
        others |= {name: f"{usage_key()}:{name}" for name in ("writers", "hours")}
        others |= {"decided": decision_ring_key(), "slots": rf"{decision_ring_key()}:\d+"}
        patterns.append(re.sub(r"[{}]", r"\\\g<0>", others.get(key.name, spelled)))
    rest = patterns[-1] if declared[-1].is_many else "$^"
    for at, sent in enumerate(keys):
        assert any(re.fullmatch(pattern, sent) for pattern in (patterns[at : at + 1] or [rest]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"after": None}, r"mark\(\) missing 1 required keyword-only argument: 'after'"),
        ({"since": 1}, r"mark\(\) got an unexpected keyword argument 'since'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_names_of_script_and_argument(
    changes: dict[str, Any], message: str
) -> None:
    arguments = {"replica": "r0", "incarnation": "life1", "before": "ready", "after": "hung"} | changes
    with pytest.raises(TypeError, match=message):
        load("mark", allow_oom=True).operands(KEYS, **{name: one for name, one in arguments.items() if one is not None})


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
    """After SCRIPT FLUSH, another gateway's settlements load `settle` again, but no gateway loads `reassert`. If
    `reassert` were sent a second time, it would bring back a request that was settled in between."""
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
