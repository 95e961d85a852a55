"""Garbage in Redis' keys, as an operator's mistake or another program's bug leaves it there.

A fault writes all garbage of one group at once, into fields that are in use. It includes the first five cases that were
found: `active r1 ''`, `owned_tokens r1 x`, `backlog_tokens nan`, `agents r0 garbage`, `entries r2 ''`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bench.faults.fault import Component, Fault
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


def _of(what: str, write: Write) -> Fault:
    async def inflict(stage: Stage) -> None:
        for command in await write(stage):
            await stage.line.ask(*command)

    return Fault(Component.REDIS, f"garbage is written into {what}", inflict)


FAULTS = {
    "garbage-load": _of("`active`, `owned_tokens`, `backlog_tokens`, `turn`", _load),
    "garbage-agents": _of(
        "`agents`, `entries`, `cursors`, `asks`, `engines`, `tiers`, `reports`, `measured`, `events`", _agents
    ),
    "garbage-replicas": _of("`replicas` and `breakers`", _replicas),
    "garbage-gateways": _of("`gateways`, `flight` and `leases`", _gateways),
    "garbage-map": _of("records of `own`, `held` and `bound`", _map),
    "garbage-types": _of("seven keys, as a string where a hash or a sorted set was", _types),
}
