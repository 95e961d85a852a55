"""Calls every script once through its Python wrapper, and lists what each script must receive."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

from coordinator.accounts import AccountLimits, Budget, Limits
from coordinator.agent.agent_store import AgentStore, Vitals
from coordinator.agent.residency import Evicted, Reset, Resident
from coordinator.decision_ring import DecisionRing
from coordinator.errors import StoreDown, StoreError
from coordinator.keys import PoolKeys
from coordinator.maintenance.held_keys import HeldKeys, forget, forget_older, look_at
from coordinator.maintenance.reaper import Reaper
from coordinator.maintenance.repair import Repair
from coordinator.placement import Placement, PlaceRequest, Prefill, Reservation, Standing, Used
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.demand import Held, read_demand
from coordinator.pool.draining import drain
from coordinator.pool.engine_feedback import tell_measured
from coordinator.pool.hedged import FirstBytes, tell
from coordinator.pool.pool import Pool
from coordinator.pool.resumed import turn_s
from coordinator.pool.routed import Split, Way, choose_way
from coordinator.pool.seats import _Waiting
from coordinator.records import AuditNote, RecordChange, RecordStore
from coordinator.redis.wire import Operands, Wire
from coordinator.registry import ReplicaRecord
from coordinator.scripts import NAMES, Script, load
from coordinator.spending import FREE, AccountBudget, Bill, Price
from coordinator.store import Store, StoreOptions
from coordinator.subset import Subset
from coordinator.usage import Consumed, Hour, Row, UsageStore
from coordinator.watch.watch_session import WatchSession
from coordinator.watch.watcher import Watcher
from tests.coordinator.stage import chain

CHUNK = "kvchunk@model@01000100@0@" + "7e" * 32
_KEYS = chain(1, 2)
_SUBSET = Subset.of(["s1"])
_OTHERS = Subset.of(["s1", "s2"])
_SHAPE = b'{"text_bytes":[3,5]}'
_BUDGET = AccountBudget("te%20nant", "month", "money", 10**9, 0.8, "2026-11", 2**31, "2026-11/money/te%20nant")
_LINES = (f"+ {_KEYS[0]} 7 8 cpu 000000000000000a", f"- {_KEYS[1]}", "reset")


class Recorder(Wire):
    """Replaces the connection and records the calls."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[list[str], list[Any]]] = {}
        self.write_lag_s = 0.0

    def run(self, script: Script, operands: Operands, *_: Any) -> asyncio.Future[Any]:
        self.tell(script, operands)
        return asyncio.get_running_loop().create_future()

    def tell(self, script: Script, operands: Operands, *_: Any) -> None:
        first_argument = 1 + operands[0]
        self.calls[script.name] = (list(operands[1:first_argument]), list(operands[first_argument:]))

    def send(self, *command: Any, at_once: bool = False) -> asyncio.Future[Any]:
        names = {load(name, allow_oom=True).text: name for name in NAMES}
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if command[0] == "EVAL":
            self.tell(load(names[command[1]], allow_oom=True), command[2:])
        elif command[0] == "ZCARD":
            reply.set_result(len(_KEYS))
        elif command[0] in ("ZRANGE", "ZRANGEBYSCORE"):
            reply.set_result([key.encode() for key in _KEYS])
        elif command[0] == "HKEYS":
            reply.set_result([b"gw7"])
        return reply


async def _begun(*calls: Coroutine[Any, Any, Any]) -> None:
    """Runs wrappers until they wait for an answer that never comes."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    for _ in range(4):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wrapper_calls() -> dict[str, tuple[list[str], list[Any]]]:
    """Calls every wrapper once, with a different value for every argument."""
    wire = Recorder()
    await _gateway_calls(wire)
    await _agent_calls(wire)
    watcher = Watcher("redis://", "gw0", 91)
    session = WatchSession(wire, "redis://", 91)
    await _begun(watcher._holds_lease(wire), session._run_tend([CHUNK], [92.5]))
    *_, choice = route = wire.calls["route"][1]
    route[-1] = re.sub(r":\d{5,}:", ":<turn>:", choice)  # as the clock says
    return wire.calls


async def _no_connection(_on_broken: Callable[[StoreError], None]) -> Wire:
    raise StoreDown("there is none")


def _others(run: Callable[..., Coroutine[Any, Any, Any]]) -> Iterator[Coroutine[Any, Any, Any]]:
    yield drain(run, "r0", is_over=True)
    yield read_demand(run, 87.5)
    yield turn_s(run)
    yield tell(run, 113, {"r0": FirstBytes(114, 115)})


async def _gateway_calls(wire: Recorder) -> None:
    pool = Pool("m", "gw0", 1.0, connect=_no_connection)
    knobs = PolicyKnobs("random", 21, 22.5, 23.5, 24, 25)
    asked = PlaceRequest(
        *("res", _KEYS, [7, 9], 11, knobs, 13, ("t1", "t2"), "rel", "pin", _SUBSET, ("o1", "o2"), True, _SHAPE),
        answer=(1, 2),
        room_share=0.5,
        standing=Standing(1, "te nant", 2.5, 93, 94, 95, 96),
        limits=Limits((AccountLimits("te%20nant", 14, 15, 16), AccountLimits("key:k", 18, 19, 20)), 17),
        bill=Bill((_BUDGET,), Price(105, 106, 107, 108), 109, 110, images=1),
    )
    placed = Placement("r0", "life1", "url", "cold", 0, 0, 2, False, 0, 11, "", "", 1, "session", False)
    pool.attach(wire)
    pool._version = "83-84"
    pool.held = Held(85, 86)
    pool.adopt(Reservation("adopted", "r0", "life1", 31, "tip", Budget((AccountLimits("tenant", 0, 34, 33),), 32, 1)))
    pool.reservations._unpoured.add(
        "spent", Budget((AccountLimits("tenant", 0, 37, 36), AccountLimits("key:k", 0, 39, 38)), 35, 1), None, True
    )
    pool.reservations.count_adopted()
    pool.reassert()
    ways = [Way(pool.placer, asked, "v1", 9), Way(pool.placer, replace(asked, prompt_tokens=12), "v2", 1)]
    await _begun(choose_way(ways, Split("", "chat", "c" * 32, True)))
    await _begun(pool.place(asked), pool.beat(leaving=True), Reaper(pool).give_back(["gw1"]))
    await _begun(look_at(pool, ["r0", "r1"]))
    record = ReplicaRecord("r0", "life1", "dead", 0, 0, "http://r0")
    swept = HeldKeys(pool, "r0", left=43, claims_before_ms=44, down_to_ms=45)
    await _begun(forget(pool, record), forget_older(pool, "r0", 41), swept.do_piece())
    await _begun(Repair(pool).repair())
    await _begun(pool.subsets.keep(), pool.subsets._reorder({_SUBSET.digest: 1}))
    pool.claims.hold("r0", _KEYS)
    pool.claims.withdraw(asked, placed)
    pool.report("r0", "life1", "failure", 8)
    pool.register(ReplicaRecord("r0", "life1", "dead", 51, 0, "http://r0"), only_if_absent=True)
    pool.seats.leave(asked)
    pool.seats._waiting["res"] = _Waiting(asked)
    pool.replicas_changed(lambda _: _OTHERS)
    await pool.seats.close()
    pool.reservations.count_adopted()
    pool.change_state("r0", "life1", "ready", "hung")
    await _begun(*_others(pool.run))
    await _record_calls(wire)
    tell_measured(pool, asked, placed, 81)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pool.reservations.spent.settle(Bill((_BUDGET,), FREE, 0, 0), Used(0, 0, 112))
    pool.settlements.soon("done", "adopted", Used(97, 98))
    await asyncio.sleep(0)
    _state_spending(pool, asked)
    await _begun(pool.place(replace(asked, serving=_SUBSET, prefill=Prefill(_OTHERS, 116, ("r9",)))))


def _state_spending(pool: Pool, asked: PlaceRequest) -> None:
    pool.live.clear()
    pool.reservations.keep(Reservation("leased", "r9", "life9", 0, "tip", bill=asked.bill, placed_ms=111))
    pool.reservations.restate_spending(["kept"])


async def _record_calls(wire: Recorder) -> None:
    store = Store(StoreOptions("redis://localhost", 1.0), "gw0")
    store._home._wire = wire
    records, change = RecordStore(store, ""), RecordChange("key/a", b"99", b"100")
    await _begun(records.put([change], AuditNote("who", "what", "subject", "tenant")))
    rows = {Row("te nant", "", "chat"): Consumed(1, 2, 3, 4, 5, 6, 7, 8 * 10**9)}
    await _begun(UsageStore(store, "", "gw0").add(101, 102, {Hour("2026-11-28T14+0100", 104): rows}, 103))
    await _begun(DecisionRing(store, "")._count(103, 104, 102))


async def _agent_calls(wire: Recorder) -> None:
    link = AgentStore(wire, PoolKeys("m"), "r0", "agent0")
    link.incarnation = "life1"
    link.entries = 76
    told = [Resident(_KEYS[0], 7, 8, "cpu", 10), Evicted(_KEYS[1]), Reset()]
    await _begun(
        link.attend(Vitals("session", True, 71, 72, {"hits": 73.0}, True, 74)),
        link.publish(told, 0.074, 75),
    )


ARGUMENTS: dict[str, list[Any]] = {
    "place": [
        *("", "gw0", 3, "res", 0, 0, 13, _SUBSET.digest, "t1 t2", "rel", "pin", "o1 o2", 11, _KEYS[-1]),
        *(
            " ".join(_KEYS),
            1,
            2,
            _SHAPE,
            1,
            0.5,
            "1 te%20nant 2.5 93 94 95 96",
            "17 0 / te%20nant 14 15 16 / key:k 18 19 20",
            "108 110 105 106 107 500 / 2026-11/money/te%20nant 1000000000",
            0,
            7,
            9,
        ),
    ],
    "declare": [_OTHERS.digest, 2, 5000, 5000, "s1", "s2"],
    "keep_subsets": ["gw0", 3000, 5000, _SUBSET.digest],
    "reorder": [_SUBSET.digest, 0, 63, 5000, 1],
    "settle": ["gw0", " / 2026-11/money/te%20nant - 112 0 0", "done", "adopted", "97 98"],
    "spend": [
        *("gw0", 3, " / 2026-11/money/te%20nant - 112 0 0", 1, 1, "kept"),
        *("leased", "111 / 2026-11/money/te%20nant 109 109 1"),
    ],
    "leave": ["gw0", "res"],
    "requeue": ["gw0", _OTHERS.digest, "res"],
    "reassert": ["gw0", 3, 3000, 1, 0, 0, "adopted", "r0", "life1", 31, "tip", "32 0.000 / tenant 33 34"],
    "beat": ["gw0", 3, 3000, 1000, 1, 1, "83-84", "85 86", 1],
    "reap": ["gw1", 128, 2000],
    "register": ["r0", "life1", "dead", 51, "http://r0", 1],
    "report": ["r0", "life1", "failure", 3, 0.5, 10_000, 5000, 8],
    "hold": ["r0", *_KEYS],
    "look": ["r0", "r1"],
    "trim": ["r0", 41, 0, 200_000, 128, 0],
    "withdraw": ["r0", "res", _KEYS[1]],
    "attend": ["r0", "agent0", "life1", 3000, "session", 1, 71, 72, b'{"hits":73.0}', 74, 1],
    "publish": ["r0", "agent0", "life1", 1000, 74, 75, 76, *_LINES],
    "sweep": ["r0", 43, 128, 44, 45],
    "measure": ["r0", "res", 81, f'{{"tip":"{_KEYS[-1]}","prompt_tokens":81}}'.encode(), 60],
    "watch": ["gw0", 3000, b"", 0],
    "forget": ["r0", "life1"],
    "mark": ["r0", "life1", "ready", "hung"],
    "drain": ["r0", 1, 0],
    "demand": [87.5],
    "resume": [8, 10],
    "hedge": [113, "r0 114 115"],
    "tend": [91_000, 92_500],
    "repair": [1, 0, 500, 0, 60_000],
    "add_usage": [
        *("gw0", 101, 102, 103, 1000, 1000),
        *("2026-11-28T14+0100", 104, "te%20nant", "-", "chat", "1 2 3 4 5 6 0.000000007 8.000000000"),
    ],
    "put_records": [ANY, "who", "what", "subject", "tenant", 10_000, "key/a", b"99", b"100"],
    "keep": [102, 7 * 24 * 3600, 103, 104],
}
"""The operands that each script must receive for the calls above, in the order of its header."""
ARGUMENTS["pair"] = [
    (
        f'{{"least_tokens":116,"subset_at":20,"subset":"kvgate:{{m}}:subset:{_OTHERS.digest}",'
        f'"arguments":[8,"{_OTHERS.digest}",4,"resp",10,"",11,"",12,"",21,"",22,"",23,""],"tried_at":9,"except_at":["r9"],"needed_at":[]}}'
    ),
    *ARGUMENTS["place"][1:],
]
ARGUMENTS["route"] = [
    *ARGUMENTS["place"],
    "".join(f"{key}{tokens:8d}" for key, tokens in zip(_KEYS, (7, 9), strict=True)),
    b'[["v2",1,0,2,"kvgate:{m}:",[17,"kvgate:tenants"],24,[13,"12"],15]]',
    f"v1 9 10 1 chat.{'c' * 32} kvgate:stays:<turn>:cc kvgate:stays:<turn>:cc kvgate:shares chat v1 9 v2 1",
]
