"""Measures what the choice among a model's backends costs in Redis: `route` beside `place` alone.

The same placements are made in turns, one way and the other, on one embedded Redis: among 8 replicas, with chains of
10, 40 and 100 keys, known (three replicas own all of it) or new. `route` chooses between two backends at 9 to 1, and
gets another chain for the second one, as it would have in another pool. Conversations have four turns.

    python -m bench.split [--calls 50] [--rounds 15] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench import record, tables
from bench.embedded import embedded_redis, open_pool
from bench.options import count
from bench.place import GATEWAY, TOKENS_PER_KEY, Bench, script_time_us
from coordinator.placement import PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.routed import Split, Way, operands_of
from coordinator.scripts import load
from coordinator.subset import Subset

REPLICAS = 8
MOST_RATIO = 1.05
"""The goal for the mean of all cases."""


class SplitBench(Bench):
    """Places prompts by `route`."""

    chain: Callable[[], list[str]]
    """Makes the other backend's."""

    async def place(self, keys: list[str]) -> tuple[float, int]:
        self._placed += 1
        tokens = [TOKENS_PER_KEY * (i + 1) for i in range(len(keys))]
        placer, subset = self._pool.placer, Subset.of(self._pool.records)
        ways = [
            Way(
                placer,
                PlaceRequest(
                    *(f"{GATEWAY}-{name}-{self._placed}", chain, tokens, tokens[-1], PolicyKnobs(), self._placed),
                    serving=subset,
                    room_share=1.0,
                ),
                name,
                weight,
            )
            for name, weight, chain in (("v1", 9, keys), ("v2", 1, self.chain()))
        ]
        self._pool.subsets.use(subset)
        script = load("route", self._pool.link.allow_oom, PolicyKnobs())
        split = Split("", "bench", f"{self._placed // 4:032x}", self._placed % 4 > 0)
        operands = script.operands(**operands_of(ways, split, 0, 0))
        await self._wire.send("CONFIG", "RESETSTAT")
        *reply, chosen = await self._wire.run(script, operands)
        assert reply[0] == b"ok", reply
        script_us = await script_time_us(self._wire)
        done = self._settle.operands(
            self._pool.keys, gateway=GATEWAY, sums="", settled=[("done", ways[chosen - 1].request.reservation, "")]
        )
        await self._wire.run(self._settle, done)
        return 0.0, script_us


async def run(url: str, calls: int, rounds: int) -> list[dict[str, Any]]:
    wire, pool, allow_oom = await open_pool(url, f"split-{os.getpid()}", GATEWAY, REPLICAS)
    await wire.send("SCRIPT", "LOAD", load("route", allow_oom, PolicyKnobs()).text)
    plain, split = Bench(wire, pool, allow_oom), SplitBench(wire, pool, allow_oom)
    await plain.give_load(0)
    rows = []
    for keys, case in product((10, 40, 100), ("known", "new")):
        chain = split.chain = await plain.chains(case, keys)
        times: dict[Bench, list[float]] = {plain: [], split: []}
        for _ in range(rounds):
            for bench, found in times.items():
                found.append((await bench.sample(chain, calls)).script_us)
        ratios = [b / a for a, b in zip(times[plain], times[split], strict=True)]
        rows.append(
            {
                "keys": keys,
                "case": case,
                "place_us": median(times[plain]),
                "route_us": median(times[split]),
                "ratio": median(ratios),
            }
        )
    await wire.close()
    return rows


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.split", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=count, default=50, help="placements in a turn (default: 50)")
    parser.add_argument("--rounds", type=count, default=15, help="turns of each way (default: 15)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    with embedded_redis() as url:
        rows = asyncio.run(run(url, options.calls, options.rounds))
    mean = sum(row["ratio"] for row in rows) / len(rows)
    drawn = tables.table(
        "One placement: this much of Redis' time",
        (),
        ("keys", "case", "place", "route", "ratio"),
        caption=f"mean ratio {mean:.3f}; goal: at most {MOST_RATIO}: {'met' if mean <= MOST_RATIO else 'missed'}",
    )
    for row in rows:
        us = (f"{row['place_us']:.0f} us", f"{row['route_us']:.0f} us")
        drawn.add_row(str(row["keys"]), row["case"], *us, f"{row['ratio']:.3f}")
    Console().print(drawn)
    record.write(options.out, rows, {"mean_ratio": mean})


if __name__ == "__main__":
    main()
