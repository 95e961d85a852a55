"""How well are requests routed?

Each mix through each system, on simulated replicas in scaled time: policies of KVGate with one gateway and with
several, other routers alone and in pairs, the two behind a spreader that knows nothing; and as references an oracle
that knows every cache and every queue, and perfect pinning of each document, image or conversation.

    python -m bench.routing [--out FILE]
    python -m bench.routing --mixes images,chat --systems prefix_kv_aware,round_robin --gateways 1,4 --seeds 1,2,3

Printed are medians over the seeds. A run in scaled time during which the machine was less than 20 % idle is invalid,
and says so: its times are those of the machine. `python -m bench.overhead --install` installs the other routers.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.machine import machine
from bench.peers import PEERS, DoesNotStart
from bench.routing.fleets import Fresh, real, simulated
from bench.routing.measure import LEAST_IDLE, Row, measure
from bench.routing.mixes import MIXES, Mix
from bench.routing.systems import NAMES, System, systems


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SystemExit(f"--{what}: {name!r} is none of {', '.join(known)}")
    return names


def table(mix: Mix, rows: Sequence[Row]) -> Table:
    """A mix's rows, each system's seeds together."""
    title = (
        f"{mix.name}: {mix.title} ({mix.replicas} replicas of {mix.capacity_tokens} tokens, {mix.concurrency} at once)"
    )
    shown = Table(title=title)
    for column in ("system", "p50", "p95", "p99 ms", "req/s", "cached", "busiest", "peak", "wrong", "idle", "failed"):
        shown.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    for label, found in _by_system(rows):
        predicted = [row.wrong_share for row in found if row.wrong_share is not None]
        peaks = [row.peak_load for row in found if row.peak_load is not None]
        shown.add_row(
            label if all(row.valid for row in found) else f"{label} [red]invalid: under {LEAST_IDLE:.0%} idle",
            *(f"{median(row.percentile_ms(share) for row in found):.0f}" for share in (0.5, 0.95, 0.99)),
            f"{median(row.per_s for row in found):.2f}",
            f"{median(row.cache_share for row in found):.4f}",
            f"{median(max(row.split) for row in found):.1%}",
            f"{median(peaks):.2f}" if peaks else "-",
            f"{median(predicted):.2%}" if predicted else "-",
            f"{min(row.idle for row in found):.0%}",
            str(sum(row.failed for row in found)),
        )
    return shown


def _by_system(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        label = f"{row.system} x{row.instances}" if row.instances > 1 else row.system
        found.setdefault(label, []).append(row)
    yield from found.items()


def measure_all(
    mixes: Sequence[Mix],
    routed_by: Sequence[System],
    seeds: Sequence[int],
    fleets: Callable[[Mix], AbstractContextManager[Fresh]],
    console: Console,
) -> list[Row]:
    """Every mix through every system, seed by seed: what drifts, drifts for all."""
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(mixes) * len(routed_by) * len(seeds))
        for mix in mixes:
            with fleets(mix) as fresh:
                for seed, system in ((seed, system) for seed in seeds for system in routed_by):
                    progress.update(task, description=f"{mix.name}, seed {seed}: {system.label}")
                    try:
                        with fresh() as fleet:
                            rows.append(asyncio.run(measure(fleet, mix, mix.make(seed), system, seed)))
                    except DoesNotStart as error:
                        console.print(f"{system.label} is left out: {error}")
                    progress.advance(task)
            console.print(table(mix, [row for row in rows if row.mix == mix.name]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", default=",".join(MIXES), help="of: %(default)s")
    parser.add_argument("--systems", default=",".join(NAMES), help="of: %(default)s")
    parser.add_argument("--gateways", default="1,2,4,8", help="for prefix_kv_aware (default: %(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="of the workloads (default: %(default)s)")
    parser.add_argument("--speed", type=float, default=4.0, help="divides the engines' times (default: %(default)s)")
    parser.add_argument("--real", action="store_true", help="on real vLLM (CPUs; the mixes and systems that can be)")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    console = Console()
    gateways = [int(count) for count in options.gateways.split(",")]
    mixes = [MIXES[name] for name in _names(options.mixes, list(MIXES), "mixes")]
    routed_by = []
    for system in systems(_names(options.systems, NAMES, "systems"), gateways):
        if system.is_missing:
            console.print(f"{system.label} is left out: python -m bench.overhead --install installs it")
        else:
            routed_by.append(system)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.real:
        mixes = [mix for mix in mixes if mix.real_capacity_tokens]
        routed_by = [system for system in routed_by if system.name != "oracle"]
    fleets = real if options.real else partial(simulated, speed=options.speed)
    rows = measure_all(mixes, routed_by, seeds, fleets, console)
    if options.out:
        versions = {name: peer.version for name, peer in PEERS.items() if peer.is_installed}
        found = {"machine": machine(), "versions": versions, "rows": [row.as_dict() for row in rows]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
