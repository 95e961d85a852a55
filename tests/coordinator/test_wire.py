"""One connection, many callers: each caller gets the reply to its own call, or the reason for its failure."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from hashlib import sha1
from typing import Any

import pytest
import redis.asyncio as redis
import uvloop
from redis.asyncio import Connection

from coordinator.errors import StoreDown, StoreError, StoreLate, StoreRefused
from coordinator.policy_knobs import PolicyKnobs
from coordinator.redis.wire import Wire, load_scripts
from coordinator.scripts import Script
from tests.coordinator.stage import calls_of
from tests.polling import eventually
from tests.redis_server import EACH_REDIS, RedisServer, running_redis, server_named

ECHO = "for i = 1, tonumber(ARGV[2]) do math.sqrt(i) end return ARGV[1]"
"""Returns its first argument, after the number of work steps in its second argument."""
SLOW = 400_000
FOREVER_S = 3600.0


def script(text: str) -> Script:
    return Script("test", text, sha1(text.encode(), usedforsecurity=False).hexdigest(), lambda: ())


@asynccontextmanager
async def wired(url: str) -> AsyncIterator[tuple[Wire, list[StoreError]]]:
    """A wire, and the errors that it reported when it broke."""
    broken: list[StoreError] = []
    wire = await Wire.open(url, 5.0, broken.append)
    try:
        yield wire, broken
    finally:
        await wire.close()


def count_writes(wire: Wire) -> list[bytes]:
    writes: list[bytes] = []
    transport = wire._transport

    class Counting:
        def write(self, data: bytes) -> None:
            writes.append(data)
            transport.write(data)

        def is_closing(self) -> bool:
            return transport.is_closing()

        def abort(self) -> None:
            transport.abort()

    wire._transport = Counting()  # type: ignore[assignment]
    return writes


async def test_replies_come_as_bytes_in_the_order_of_the_calls(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, _):
        assert await asyncio.gather(*(wire.send("ECHO", i) for i in range(50))) == [b"%d" % i for i in range(50)]


async def test_calls_of_one_turn_leave_in_one_write(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, _):
        writes = count_writes(wire)
        await asyncio.gather(*(wire.send("ECHO", i) for i in range(50)))
        assert len(writes) == 1
        await asyncio.gather(*(wire.run(script(ECHO), (0, i, 0)) for i in range(50)))
        assert len(writes) <= 3  # the server did not know the script, so the calls of one read are repeated together


async def test_an_error_reply_concerns_only_its_own_caller(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, broken):
        calls = [wire.send("ECHO", 1), wire.send("NONSENSE"), wire.send("ECHO", 2)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[::2] == [b"1", b"2"]
        assert isinstance(results[1], StoreRefused)
        assert broken == []


async def test_a_command_that_cannot_be_packed_shifts_no_reply(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, broken), asyncio.timeout(5.0):
        with pytest.raises(UnicodeEncodeError):
            wire.send("ECHO", "\ud800")
        assert wire.oldest_age_s() == 0
        assert await asyncio.gather(*(wire.send("ECHO", i) for i in range(3))) == [b"0", b"1", b"2"]
        assert broken == []


async def test_replies_never_go_to_the_wrong_caller(redis_server: RedisServer, client: redis.Redis) -> None:
    """Calls are cancelled and run late at random. Now and then a slow script lets replies pile up."""
    dice = random.Random(5)
    outcomes: dict[str, int] = dict.fromkeys(("answered", "late", "cancelled"), 0)
    abandoned: dict[str, bytes] = {}

    async def call(wire: Wire, name: str) -> None:
        budget_s = dice.choice([FOREVER_S, 0.0001, 0.002])
        work = SLOW if dice.random() < 0.02 else 0
        reply = wire.run(script(ECHO), (0, name, work), budget_s, lambda late: abandoned.__setitem__(name, late))
        if dice.random() < 0.3:
            asyncio.get_running_loop().call_later(dice.random() * 0.004, reply.cancel)
        try:
            assert await reply == name.encode()
            outcomes["answered"] += 1
        except StoreLate:
            outcomes["late"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1

    async with wired(redis_server.url) as (wire, broken):
        for turn in range(60):
            await asyncio.gather(*(call(wire, f"{turn}.{i}") for i in range(10)))
        assert await wire.send("ECHO", "end") == b"end"
        assert broken == []
    assert sum(outcomes.values()) == 600
    assert min(outcomes.values()) > 10
    assert len(abandoned) == outcomes["late"] + outcomes["cancelled"]
    assert all(reply == name.encode() for name, reply in abandoned.items())


async def test_a_late_caller_fails_at_its_budget_and_others_do_not(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with wired(redis_server.url) as (wire, broken):
        redis_server.pause()
        try:
            late: list[Any] = []
            hasty = wire.run(script(ECHO), (0, "hasty", 0), 0.01, late.append)
            patient = wire.run(script(ECHO), (0, "patient", 0), FOREVER_S)
            with pytest.raises(StoreLate):
                await hasty
            assert not patient.done()
            assert wire.oldest_age_s() > 0
        finally:
            redis_server.resume()
        assert await patient == b"patient"
        assert late == [b"hasty"]
        assert wire.oldest_age_s() == 0
        assert broken == []


async def test_what_nobody_waits_for_is_told_its_reply_or_why_there_is_none(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    told: list[Any] = []
    async with wired(redis_server.url) as (wire, _):
        wire.tell(script(ECHO), (0, "first", 0), told.append)
        wire.tell(script("return redis.error_reply('NO')"), (0,), told.append)
        wire.tell(script(ECHO), (0, "unheard", 0))
        for _ in range(2):  # if the server does not know a script, the script is sent again after the first call
            assert await wire.send("PING") == b"PONG"
        redis_server.pause()
        try:
            wire.tell(script(ECHO), (0, "lost", 0), told.append)
            await wire.close("had enough")
        finally:
            redis_server.resume()
        wire.tell(script(ECHO), (0, "too late", 0), told.append)
    assert told[0] == b"first"
    assert [type(reply) for reply in told[1:]] == [StoreRefused, StoreDown, StoreDown]


async def test_a_refusal_reaches_a_caller_that_gave_up_as_well(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, _):
        late: list[Any] = []
        wire.run(script("return redis.error_reply('NO')"), (0,), FOREVER_S, late.append).cancel()
        await wire.send("PING")
        await eventually(lambda: late)
        assert isinstance(late[0], Exception)


async def test_when_the_server_goes_every_pending_call_fails(client: redis.Redis) -> None:
    with running_redis() as server:
        async with wired(server.url) as (wire, broken):
            server.pause()
            calls = [wire.send("ECHO", i) for i in range(5)]
            await asyncio.sleep(0)
            server.kill()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result) for result in results} == {StoreDown}
            assert len(broken) == 1
            with pytest.raises(StoreDown):
                await wire.send("PING")


@pytest.mark.parametrize("name", EACH_REDIS)
async def test_a_server_that_has_become_a_replica_has_lost_the_connection(name: str) -> None:
    with running_redis(server_named(name)) as server:
        async with wired(server.url) as (wire, broken):
            assert await wire.run(script("return redis.call('INCR', KEYS[1])"), (1, "kvgate:n")) == 1
            await wire.send("REPLICAOF", "127.0.0.1", "1")
            calls = [wire.run(script("return redis.call('INCR', KEYS[1])"), (1, "kvgate:n")), wire.send("PING")]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result) for result in results} == {StoreDown}
            assert "READONLY" in str(broken[0])


async def test_closing_fails_what_is_pending_and_does_not_wait_for_the_server(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with wired(redis_server.url) as (wire, _):
        redis_server.pause()
        try:
            call = wire.send("PING")
            await wire.close("had enough")
            with pytest.raises(StoreDown, match="had enough"):
                await call
        finally:
            redis_server.resume()


async def test_closing_right_behind_a_write_ends(redis_server: RedisServer, client: redis.Redis) -> None:
    for turns in range(6):
        async with wired(redis_server.url + "?socket_timeout=5") as (wire, _):
            wire.send("PING")
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_closing_twice_is_harmless(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, broken):
        await wire.close()
        await wire.close()
        assert len(broken) == 1


async def test_a_server_that_is_not_there_is_down() -> None:
    with pytest.raises(StoreDown, match="cannot connect"):
        await Wire.open("redis://127.0.0.1:1/0", 1.0, lambda _: None)


async def test_a_server_that_accepts_and_says_nothing_is_down_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreDown):
        await Wire.open(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", 0.1, lambda _: None)


async def test_a_server_that_talks_nonsense_breaks_the_wire(redis_server: RedisServer, client: redis.Redis) -> None:
    async with wired(redis_server.url) as (wire, broken):
        wire.data_received(b"+what nobody asked for\r\n")
        assert "nobody asked" in str(broken[0])


@pytest.mark.parametrize("step", ["_connect", "connect"])
def test_a_connection_that_is_lost_while_it_is_opened_or_handed_over_is_down(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    go_on = getattr(Connection, step)

    async def lose(self: Any) -> None:
        await go_on(self)
        self._writer.transport.abort()
        if step == "_connect":  # before the greeting
            await asyncio.sleep(0)

    monkeypatch.setattr(Connection, step, lose)

    async def main() -> None:
        lost: asyncio.Future[StoreError] = asyncio.get_running_loop().create_future()
        try:
            wire = await Wire.open(redis_server.url, 5.0, lost.set_result)
        except StoreError as error:
            lost.set_result(error)
        else:
            await asyncio.wait_for(lost, 5)
            await wire.close()
        assert isinstance(lost.result(), StoreDown)

    asyncio.run(main())
    uvloop.run(main())


def test_the_wire_works_on_uvloop(redis_server: RedisServer) -> None:
    async def main() -> list[Any]:
        async with wired(redis_server.url) as (wire, _):
            late = wire.run(script(ECHO), (0, "late", SLOW), 0.0001)
            replies = await asyncio.gather(late, *(wire.send("ECHO", i) for i in range(3)), return_exceptions=True)
            return list(replies)

    run: Callable[[Coroutine[Any, Any, list[Any]]], list[Any]] = uvloop.run
    late, *others = run(main())
    assert isinstance(late, StoreLate)
    assert others == [b"0", b"1", b"2"]


async def test_only_missing_scripts_are_loaded(redis_server: RedisServer, client: redis.Redis) -> None:
    """Each gateway that reconnects to a slow server would load all of them: tens of KB each."""
    async with wired(redis_server.url) as (wire, _):
        await client.script_flush()
        await load_scripts(wire)
        await client.config_resetstat()
        await load_scripts(wire)
        calls = await calls_of(client)
        assert sum(count for name, count in calls.items() if name.startswith("script")) <= 3
        assert await client.script_exists(wire.script("place").sha) == [True]


async def test_the_placements_of_a_gateway_are_loaded_with_its_own_settings(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Requests that come together at the start would each find that it is missing, and go on without the store."""
    knobs = PolicyKnobs(max_active_requests=7)
    async with wired(redis_server.url) as (wire, _):
        await client.script_flush()
        await load_scripts(wire, [knobs])
        assert await client.script_exists(wire.script("place", knobs).sha) == [True]
