"""Redis' time of a request with no budget, one, and two: the same placements and settlements, in turns.

A turn stands for the time between two heartbeats of a gateway, behind another one with as many requests. It begins with
slices of its budgets, and ends with their statement. With little left of them there are none, and each request is asked
about.
"""

from __future__ import annotations

import asyncio
import random
from statistics import median
from typing import Any

from bench.embedded import info, open_pool, usage
from bench.store.requests import TOKENS, Gateway
from coordinator.placement import Used
from coordinator.redis.wire import Wire
from coordinator.spending import AccountBudget, Bill, Per, Price

_LEFT = {"much": 10**17, "little": 2 * 10**9}


async def cost(url: str, replicas: int, requests: int, rounds: int) -> list[dict[str, Any]]:
    """Settings take turns on one pool, each round in another order."""
    wire, pool = await open_pool(url, f"bench-{replicas}", "bench.0", replicas)
    pers: list[tuple[Per, str]] = [("month", "2026-11"), ("day", "2026-11-28")]
    price = Price(10**9, 10**8, 4 * 10**9)
    bills: list[Bill | None] = [None]
    for left, limit in _LEFT.items():
        account = f"{left}-{replicas}"
        budgets = [
            AccountBudget(account, per, "money", limit, 0.8, window, 2**31, f"{window}/money/{account}")
            for per, window in pers
        ]
        bills += (Bill(tuple(budgets[:many]), price, TOKENS[-1], 200) for many in (1, 2))
    found: list[list[tuple[float, float]]] = [[] for _ in bills]
    gateway = Gateway(pool)
    gateway.used = Used(900, 300, 90_000)
    await gateway.learn()
    for _ in range(rounds):
        for at in random.sample(range(len(bills)), len(bills)):
            gateway.bill = bills[at]
            found[at].append(await _turn(wire, gateway, requests))
    await wire.close()
    return [
        {
            "replicas": replicas,
            "budgets": len(bill.budgets) if bill else 0,
            "left": bill.budgets[0].account.partition("-")[0] if bill else "-",
            **_medians(turns, found[0]),
        }
        for bill, turns in zip(bills, found, strict=True)
    ]


async def _turn(wire: Wire, gateway: Gateway, requests: int) -> tuple[float, float]:
    """The time of scripts and Redis' CPU time for a request, in us."""
    for _ in range(requests):
        await gateway.serve()
    await gateway.beats()
    await wire.send("CONFIG", "RESETSTAT")
    before = await usage(wire)
    for _ in range(requests):
        await gateway.serve()
    await gateway.beats()
    await asyncio.sleep(0.01)  # the last settlements
    cpu_s = (await usage(wire)).cpu_s - before.cpu_s
    _, _, script_us = (await info(wire, "commandstats"))["cmdstat_evalsha"].partition("usec=")
    return int(script_us.partition(",")[0]) / requests, cpu_s * 1e6 / requests


def _medians(turns: list[tuple[float, float]], without: list[tuple[float, float]]) -> dict[str, float]:
    found = {}
    for at, name in enumerate(("script", "cpu")):
        found[f"{name}_us"] = median(turn[at] for turn in turns)
        found[f"{name}_ratio"] = median(turn[at] / none[at] for turn, none in zip(turns, without, strict=True))
    return found
