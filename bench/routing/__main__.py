"""How well are requests routed?

Each mix of requests goes through each system, on simulated replicas in scaled time. The systems are KVGate's policies
with one gateway and with several; an Envoy that asks so many pickers, alone or half pickers and half gateways; and
other routers: one instance, or two behind a spreader that knows nothing. The reference is perfect pinning of each
document, image or conversation.

    python -m bench.routing [--out FILE]
    python -m bench.routing --mixes images,chat --systems prefix_kv_aware,round_robin --gateways 1,4 --seeds 1,2,3
    python -m bench.routing --at http://gpu1:8000 http://gpu2:8000 --mixes chat      on replicas that already run

The tables show medians over the seeds. A run in scaled time is invalid if the machine was less than 20 % idle, and is
marked so: its times are those of the machine. A router's own time is not scaled, so it counts --speed times as much.
Other routers (`python -m bench.overhead --install`) run cache_aware with their defaults, and once more (-tight) with a
threshold for leaving affinity that fits this low number of requests. KVGate runs with its defaults, except that it may
wait 200 ms for Redis instead of 20, because Redis shares the processors with all other processes here.

Replicas of --at are vLLM with VLLM_SERVER_DEV_MODE=1, because their caches are emptied before each run. A mix can run
there if it is for so many replicas. They should have KV caches of its size (vLLM's --num-gpu-blocks-override). Before
0.32, vLLM does not tell where it publishes events: then write events and replay beside the URL, as for `kvgate up`.
docs/evidence/performance.md ("Real vLLM") starts three servers with dummy weights on one GPU for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.options import counts, names, positive
from bench.peers import DoesNotStart
from bench.routing.fleets import Fresh, real, running, simulated
from bench.routing.measure import WRONG, Row, measure
from bench.routing.mixes import MIXES, Mix
from bench.routing.systems import NAMES, ROUTERS, System, label, systems
from bench.scaled_time import INVALID

_LEGEND = (
    "cached: of the prompts' tokens. busiest: the busiest replica's share of the requests. peak: the highest ratio of "
    f"a replica's load to the mean while its queue grew. wrong: {WRONG}. idle: the idle share of the machine."
)


def _table(mix: Mix, rows: Sequence[Row]) -> Table:
    """A mix's rows, with the seeds of each system joined."""
    title = (
        f"{mix.name}: {mix.title} ({mix.replicas} replicas of {mix.capacity_tokens} tokens, {mix.concurrency} at once)"
    )
    columns = ["p50", "p95", "p99 ms", "req/s", "cached", "busiest", "peak", "wrong", "idle"]
    if any(row.failed for row in rows):
        columns.append("failed")
    shown = tables.table(title, ("system",), columns, caption=_LEGEND)
    for system, found in _by_system(rows):
        shown_as = system
        failed = [str(sum(row.failed for row in found))] if "failed" in columns else []
        idle = f"{min(row.idle for row in found):.0%}"
        counted = [row for row in found if row.valid and row.requests]
        if len(counted) < len(found):
            shown_as = f"{system} [red]{len(found) - len(counted)} {INVALID}"
        if not counted:
            shown.add_row(shown_as, *"-" * 8, idle, *failed)
            continue
        predicted = [row.wrong_share for row in counted if row.wrong_share is not None]
        peaks = [row.peak_load for row in counted if row.peak_load is not None]
        shown.add_row(
            shown_as,
            *(f"{median(row.percentile_ms(share) for row in counted):.0f}" for share in (0.5, 0.95, 0.99)),
            f"{median(row.per_s for row in counted):.2f}",
            f"{median(row.cache_share for row in counted):.1%}",
            f"{median(max(row.split) for row in counted):.1%}",
            f"{median(peaks):.2f}" if peaks else "-",
            f"{median(predicted):.2%}" if predicted else "-",
            idle,
            *failed,
        )
    return shown


def _by_system(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(label(row.system, row.instances), []).append(row)
    yield from found.items()


@dataclass
class Run:
    """All measurements to make, and their results so far."""

    routed_by: Sequence[System]
    seeds: Sequence[int]
    fleets: Callable[[Mix], AbstractContextManager[Fresh]]
    found: record.Found[Row]

    def measure(self, mixes: Sequence[Mix]) -> None:
        """Runs every mix through every system, seed by seed, so that changes of the machine's speed affect all systems
        alike. Writes the file after each of them."""
        with record.progress(self.found.console) as progress:
            task = progress.add_task("", total=len(mixes) * len(self.routed_by) * len(self.seeds))
            for mix in mixes:
                with self.fleets(mix) as fresh:
                    for seed, system in ((seed, system) for seed in self.seeds for system in self.routed_by):
                        progress.update(task, description=f"{mix.name}, seed {seed}: {system.label}")
                        self._measure(mix, seed, system, fresh)
                        self.found.save()
                        progress.advance(task)
                self.found.console.print(_table(mix, [row for row in self.found.rows if row.mix == mix.name]))

    def _measure(self, mix: Mix, seed: int, system: System, fresh: Fresh) -> None:
        try:
            with fresh() as fleet:
                self.found.rows.append(asyncio.run(measure(fleet, mix, mix.make(seed), system, seed)))
        except (DoesNotStart, RuntimeError, OSError, httpx.HTTPError) as error:
            self.found.leave_out(f"{mix.name}, seed {seed}, {system.label}: {error}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mixes, known = ",".join(MIXES), ",".join(NAMES)
    parser.add_argument("--mixes", type=names(MIXES), default=mixes, help="default: %(default)s")
    parser.add_argument("--systems", type=names(NAMES), default=known, help="default: %(default)s")
    parser.add_argument(
        "--gateways", type=counts, default="1,2,4,8", help="of prefix_kv_aware, and pickers (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        type=counts,
        default="11,12,13",
        help="seeds of the workloads; the weights were tuned with 1 to 10 (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=positive,
        default=4.0,
        help="divides the engines' times, not the routers' (default: %(default)s)",
    )
    parser.add_argument("--real", action="store_true", help="on real vLLM (CPUs; only mixes that can)")
    parser.add_argument("--at", nargs="+", default=[], metavar="URL[,events=…,replay=…]", help="real vLLM, running")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    able = list(MIXES.values())
    if options.real:
        able = [mix for mix in able if mix.real_capacity_tokens]
    if options.at:
        able = [mix for mix in able if mix.replicas == len(options.at)]
    options.mixes = [MIXES[name] for name in options.mixes if MIXES[name] in able]
    if not options.mixes:
        known = ", ".join(mix.name for mix in able) or "none"
        parser.error(f"nothing of this can be run on real vLLM like that; the mixes that can: {known}")
    return options


def _fleets(options: argparse.Namespace) -> Callable[[Mix], AbstractContextManager[Fresh]]:
    if options.at:
        return partial(running, replicas=options.at)
    return real if options.real else partial(simulated, speed=options.speed)


def main() -> None:
    record.begin()
    options = _options()
    routed_by = systems(options.systems, options.gateways)
    versions = {"kvgate": metadata.version("kvgate")} | {name: peer.version for name, peer in ROUTERS.items()}
    there = [system for system in routed_by if not system.missing]
    found = record.Found[Row](versions, options.out, Console())
    for system in routed_by:
        if system.missing:
            found.leave_out(f"{system.label}: {system.missing}")
    try:
        Run(there, options.seeds, _fleets(options), found).measure(options.mixes)
    except (httpx.HTTPError, RuntimeError) as error:
        if not options.at:
            raise
        sys.exit(f"the replicas of --at cannot be measured: {error}")


if __name__ == "__main__":
    main()
