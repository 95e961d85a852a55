"""Garbage in Redis' keys, as an operator's mistake or another program's bug leaves it there.

A fault writes all garbage of one group at once, into fields that are in use. It includes the first five cases that were
found: `active r1 ''`, `owned_tokens r1 x`, `backlog_tokens nan`, `agents r0 garbage`, `entries r2 ''`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bench.faults.fault import Component, Fault
from bench.faults.queue import queue_keys
from bench.faults.stage import Stage

Command = tuple[str | int, ...]
Write = Callable[[Stage], Awaitable[list[Command]]]


async def _load(stage: Stage) -> list[Command]:
    keys = stage.keys
    return [
        ("HSET", keys.active, "r1", ""),
        ("HSET", keys.active, "r2", "-5"),
        ("HSET", keys.owned_tokens, "r1", "x"),
        ("HSET", keys.backlog_tokens, "r1", "nan"),
        ("HSET", keys.backlog_tokens, "r2", "1 2"),
        ("SET", keys.turn, "next"),
    ]


async def _agents(stage: Stage) -> list[Command]:
    keys = stage.keys
    return [
        ("HSET", keys.agents, "r0", "garbage"),
        ("HSET", keys.entries, "r2", ""),
        ("HSET", keys.cursors, "r1", "x y z"),
        ("HSET", keys.asks, "r1", "dance"),
        ("HSET", keys.engines, "r0", "{"),
        ("HSET", keys.tiers, "r2", "fast"),
        ("HSET", keys.reports, "r0", "yesterday"),
        ("LPUSH", keys.measured("r1"), "no JSON"),
        ("XADD", keys.events("r0"), "*", "n", "many"),
    ]


async def _replicas(stage: Stage) -> list[Command]:
    keys = stage.keys
    return [
        ("HSET", keys.replicas, "r1", "garbage"),
        ("HSET", keys.replicas, "ghost", ""),
        ("HSET", keys.breakers, "r2", "open"),
        ("HSET", keys.breakers, "r0", "1 2"),
    ]


async def _gateways(stage: Stage) -> list[Command]:
    keys = stage.keys
    there = [name.decode() for name in await stage.line.ask("HKEYS", keys.gateways)]
    return [
        ("HSET", keys.gateways, there[0], "garbage"),
        ("HSET", keys.gateways, "ghost.1", ""),
        ("HSET", keys.flight(there[-1]), "no reservation", "garbage"),
        ("HSET", keys.leases, "tick", "never"),
        ("HSET", keys.leases, "worker", "nobody"),
        ("HSET", keys.leases, "events:r0", "garbage"),
    ]


async def _map(stage: Stage) -> list[Command]:
    """Into the records of the keys that r0 used last."""
    keys = stage.keys
    used = [key.decode() for key in await stage.line.ask("ZREVRANGE", keys.held("r0"), 0, 7)]
    records: list[Command] = [("HSET", keys.own(key), "r0", "garbage") for key in used[:4]]
    records += [("HSET", keys.own(key), "ghost", "1 resident gpu x") for key in used[4:]]
    tips = await stage.line.ask("HKEYS", keys.bound_slot(0)) or await stage.line.ask("HKEYS", keys.bound_slot(1))
    return [
        *records,
        ("ZADD", keys.held("r1"), 1, "no key"),
        *(("HSET", keys.bound_slot(slot), tip, "garbage") for slot in (0, 1) for tip in tips[:3]),
    ]


async def _types(stage: Stage) -> list[Command]:
    """Replaces keys with keys of another type."""
    keys = stage.keys
    wrong = (keys.cursors, keys.tiers, keys.reports, keys.breakers, keys.asks, keys.active, keys.held("r0"))
    return [command for key in wrong for command in (("DEL", key), ("SET", key, "garbage"))]


async def _queue(stage: Stage) -> list[Command]:
    """The first gateway that has seats loses one, the last one all of them."""
    keys, line = stage.keys, stage.line
    base = keys.waiting.removesuffix("waiting")
    there = [(name.partition(":")[0], base + name) for name in await queue_keys(line, keys)]
    seats = [key for kind, key in there if kind == "seats"]
    names = [name.decode() for name in await line.ask("HKEYS", keys.waiting)]
    some_seats = await line.ask("HKEYS", seats[0])
    charged = {key: (await line.ask("HRANDFIELD", key)) for kind, key in there if kind == "charges"}
    wrong_types = [seats[-1], *(key for kind, key in there if kind == "turns")]
    return [
        *(("HSET", keys.waiting, name, "many") for name in (*names, "ghost")),
        *(("HSET", keys.paces, name.partition(" ")[2], "fast") for name in names),
        *(("HSET", keys.fair, name.partition(" ")[0], "late") for name in names),
        *(("HSET", seats[0], seat, "{") for seat in ("ghost", *some_seats[:1])),
        *(("ZADD", key, 0, "nobody") for kind, key in there if kind == "line"),
        *(("RPUSH", keys.grants(key.rpartition(":")[2]), "no JSON") for key in seats),
        *(("HSET", key, charged[key], "garbage") for key in charged),
        *(command for key in wrong_types for command in (("DEL", key), ("SET", key, "garbage"))),
    ]


def _of(what: str, write: Write, loses_load: bool = False, is_of_the_queue: bool = False) -> Fault:
    async def inflict(stage: Stage) -> None:
        for command in await write(stage):
            await stage.line.ask(*command)

    sentence = f"garbage is written into {what}"
    return Fault(Component.REDIS, sentence, inflict, loses_load=loses_load, is_of_the_queue=is_of_the_queue)


FAULTS = {
    "garbage-load": _of("`active`, `owned_tokens`, `backlog_tokens`, `turn`", _load, loses_load=True),
    "garbage-agents": _of(
        "`agents`, `entries`, `cursors`, `asks`, `engines`, `tiers`, `reports`, `measured`, `events`", _agents
    ),
    "garbage-replicas": _of("`replicas` and `breakers`", _replicas),
    "garbage-gateways": _of("`gateways`, `flight` and `leases`", _gateways, loses_load=True),
    "garbage-map": _of("records of `own`, `held` and `bound`", _map),
    "garbage-types": _of("seven keys, as a string where a hash or a sorted set was", _types, loses_load=True),
    "garbage-queue": _of(
        "`waiting`, `paces`, `fair`, `seats`, `line`, `grants` and `charges`, and as a string into `turns` and a "
        "gateway's `seats`",
        _queue,
        is_of_the_queue=True,
    ),
}
