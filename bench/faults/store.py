"""Faults of Redis."""

from __future__ import annotations

import asyncio

from bench.faults.fault import LASTS_S, PLAIN, RESTARTS_AFTER_S, Component, Fault, Inflict
from bench.faults.redis import until
from bench.faults.stage import Layout, Stage
from bench.faults.stepped_clock import OFFSET_KEY
from coordinator.errors import StoreError

_AWAY_S = 4.0
_BACK_WITHIN_S = 20.0
_CLOCK_STEP_MS, _STEPPED_S = 3_600_000, 8.0
_SLOW_S = 0.03
_CHUNK_BYTES, _ROOM_BYTES = 256 * 1024, 4 * 2**20


async def _start(stage: Stage) -> None:
    stage.redis.server.start()
    await until(stage.redis.answers, _BACK_WITHIN_S, "Redis")


async def _kill(stage: Stage) -> None:
    await stage.redis.server.kill()
    await asyncio.sleep(RESTARTS_AFTER_S)
    await _start(stage)


async def _stop(stage: Stage) -> None:
    await stage.redis.server.stop()
    await asyncio.sleep(_AWAY_S)
    await _start(stage)


async def _freeze(stage: Stage) -> None:
    stage.redis.server.freeze()
    await asyncio.sleep(LASTS_S)
    stage.redis.server.thaw()


async def _empty(stage: Stage) -> None:
    await stage.line.ask("FLUSHALL")


async def _flush_scripts(stage: Stage) -> None:
    await stage.line.ask("SCRIPT", "FLUSH")


async def _cut_connections(stage: Stage) -> None:
    await stage.line.ask("CLIENT", "KILL", "TYPE", "normal")


async def _slow(stage: Stage) -> None:
    stage.proxies["store"].slow(_SLOW_S)
    await asyncio.sleep(LASTS_S)
    await stage.proxies["store"].mend()


async def _fill(stage: Stage) -> None:
    """Fills Redis with values as LMCache would write them, until it takes no more."""
    told = (await stage.line.ask("INFO", "memory")).decode()
    used = next(line for line in told.splitlines() if line.startswith("used_memory:"))
    await stage.line.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await stage.line.ask("CONFIG", "SET", "maxmemory", int(used.partition(":")[2]) + _ROOM_BYTES)
    names = [f"kvchunk@model@01000100@0@{number:064x}" for number in range(2 * _ROOM_BYTES // _CHUNK_BYTES)]
    try:
        for name in names:
            await stage.line.ask("SET", name, bytes(_CHUNK_BYTES))
    except StoreError:
        await asyncio.sleep(LASTS_S)
    else:
        raise TimeoutError("Redis took more than its memory")
    finally:
        await stage.line.ask("CONFIG", "SET", "maxmemory", 0)
        await stage.line.ask("UNLINK", *names)


# Opens a breaker for the time of a first opening, as lua/report.lua would.
_OPEN_BREAKER = """
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(redis.call('GET', ARGV[1]))
return redis.call('HSET', ARGV[2], ARGV[3], string.format('3 %d 0', now_ms + 5000))
"""


async def _step_clock(stage: Stage) -> None:
    """Just before the clock goes back, writes the two records that can outlive this the longest: an open breaker, and
    the lease of a gateway that nobody renews any more."""
    await stage.line.ask("SET", OFFSET_KEY, _CLOCK_STEP_MS)
    await asyncio.sleep(_STEPPED_S)
    await stage.line.ask("EVAL", _OPEN_BREAKER, 0, OFFSET_KEY, stage.keys.breakers, "r0")
    stage.strike(RESTARTS_AFTER_S, gateways=(0,))
    await stage.gateways[0].kill()
    await stage.line.ask("DEL", OFFSET_KEY)
    stage.gateways[0].start()


async def _fail_over(stage: Stage) -> None:
    sentinels = stage.sentinels
    assert sentinels is not None
    master = await sentinels.master()
    await master.kill()
    await until(lambda: sentinels.takes_writes(master), _BACK_WITHIN_S, "another master")
    master.start()


def _of(sentence: str, inflict: Inflict, layout: Layout = PLAIN, loses_load: bool = False) -> Fault:
    return Fault(Component.REDIS, sentence, inflict, layout, loses_load=loses_load)


FAULTS = {
    "redis-stopped": _of(
        f"Redis is told to stop (SIGTERM), and started again {_AWAY_S:g} s later, empty", _stop, loses_load=True
    ),
    "redis-killed": _of(
        f"Redis is killed, and started again {RESTARTS_AFTER_S:g} s later, empty", _kill, loses_load=True
    ),
    "redis-frozen": _of(f"Redis is frozen (SIGSTOP) for {LASTS_S:g} s", _freeze),
    "redis-emptied": _of("Redis is emptied (FLUSHALL)", _empty, loses_load=True),
    "redis-full": _of(f"Redis is full of chunks and evicts nothing (maxmemory, noeviction) for {LASTS_S:g} s", _fill),
    "redis-slow": _of(
        f"Redis answers {_SLOW_S * 1000:g} ms late, to all, for {LASTS_S:g} s", _slow, Layout(proxied=("store",))
    ),
    "redis-failed-over": _of(
        "the master is killed, and sentinels make one of two replicas the master",
        _fail_over,
        Layout(sentinels=True),
        loses_load=True,
    ),
    "redis-clock": Fault(
        Component.REDIS,
        f"Redis' clock goes an hour ahead and, {_STEPPED_S:g} s later, back; just before, a breaker opens "
        "and a gateway is killed",
        _step_clock,
        Layout(stepped_clock=True),
        right_within_s=5.0,  # a gateway is killed
    ),
    "redis-scripts": _of("Redis forgets all scripts (SCRIPT FLUSH)", _flush_scripts),
    "redis-connections": _of("Redis cuts all connections (CLIENT KILL TYPE normal)", _cut_connections),
}
