"""Measures the effect of each fault on clients, and the time until all is right again, for docs/evidence/faults.md.

    python -m bench.faults [--gateways 2] [--replicas 3] [--waiting] [--only redis-killed,agent-frozen] [--again]

Each fault gets its own cluster of real processes: Redis, three simulated replicas with agents, and gateways. A load
balancer that behaves well sends them 24 requests a second, half of them streamed. Results for the same code are kept
(bench/results/faults.json), so a run continues where the last one ended. With 2 gateways all faults are measured, in
half an hour. With more, only the faults of gateways and of Redis and the rolling restart. Of more than three replicas,
the others are light ones in one process (bench/fleet/replicas.py). Use a machine that does nothing else.

With --waiting, replicas have a cap, and clients send more than that all the time, so requests wait in KVGate's queue.
All faults then take 40 minutes.

Goals: no request fails that could have been saved. No answer is more than 5 s late, unless its replica or gateway was
struck while it handled the request. Decisions are exact again within 5 s (gateways, agents, links) or 2 s
(Redis). No load is left, and predictions are right. With --waiting, the 5 s begin when the queue's time is over,
requests did wait, no replica has more than its cap unless the fault explains it, and no seat is left. The exit status
is 1 if a goal is missed.

The faults:
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.faults import results
from bench.faults.measure import NotWhole, measure
from bench.faults.page import PAGE, write
from bench.faults.row import Row, Section
from bench.faults.stage import REPLICAS
from bench.faults.table import FAULTS, measured_with
from bench.machine import machine
from bench.options import count, names
from coordinator.errors import StoreError
from gateway import __version__
from gateway.ops.errors import CommandError


def measured(name: str, section: Section, code: str) -> Row:
    """Measures one fault on its own cluster. If the cluster does not start, the row holds the reason."""
    row = Row(name, section.gateways, code, machine()["commit"], section.replicas, waits=section.waits)
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-faults-") as folder:
            return asyncio.run(measure(FAULTS[name], row, Path(folder)))
    except (NotWhole, TimeoutError, OSError, StoreError, CommandError) as error:
        return replace(row, skipped=f"{type(error).__name__}: {error}")


def run(wanted: list[str], section: Section, code: str, found: record.Found[Row]) -> None:
    """Measures the faults one after another. Saves the results after each."""
    with record.progress(found.console) as progress:
        task = progress.add_task("", total=len(wanted))
        for name in wanted:
            progress.update(task, description=name)
            row = measured(name, section, code)
            results.put(found.rows, row, list(FAULTS))
            found.save()
            met = f"left out: {row.skipped}" if row.skipped else "; ".join(row.missed) or "met"
            found.console.print(f"{name}: {met}", markup=False, highlight=False)
            progress.advance(task)


def _table(rows: list[Row]) -> Table:
    figures = ("requests", "failed", "savable", "late", "excused", "exact s", "wrong")
    table = tables.table("Faults", ("fault", "load left"), figures)
    for row in rows:
        right = "" if row.right_after_s is None else f"{row.right_after_s:.1f}"
        counts = (row.requests, row.failed, row.savable, row.late, row.late_excused)
        table.add_row(row.fault, row.load_left, *map(str, counts), right, str(len(row.wrong)))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults",
        description=(__doc__ or "") + "".join(f"\n  {name:<26} {one.sentence}" for name, one in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gateways", type=count, default=2, metavar="N", help="two or more (default: 2)")
    parser.add_argument("--replicas", type=count, default=3, metavar="N", help="three or more (default: 3)")
    parser.add_argument("--waiting", action="store_true", help="replicas have a cap, and requests wait for their turn")
    parser.add_argument(
        "--only", type=names(FAULTS), default=[], metavar="NAME,…", help="faults to measure (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="also measure faults that have results for this code")
    parser.add_argument(
        "--out", type=Path, default=results.FILE, metavar="FILE", help="the rows as JSON (default: %(default)s)"
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page (default: %(default)s)")
    options = parser.parse_args()
    if options.gateways < 2:
        parser.error("--gateways: a fault of one gateway needs another that serves on")
    if options.replicas < len(REPLICAS):
        parser.error(f"--replicas: at least {len(REPLICAS)}")
    if options.waiting and options.replicas > len(REPLICAS):
        parser.error(f"--waiting: its load fills {len(REPLICAS)} replicas")
    return options


def main() -> None:
    record.begin()
    options, console = _options(), Console()
    code = results.code()
    found = record.Found[Row]({"kvgate": __version__}, options.out, console, results.read(options.out))
    wanted = options.only or measured_with(options.gateways, options.waiting)
    section = Section(options.gateways, options.replicas, options.waiting)
    left = results.to_measure(wanted, section, code, found.rows, options.again)
    if len(left) < len(wanted):
        console.print(f"{len(wanted) - len(left)} of {len(wanted)} were measured of this code before")
    run(left, section, code, found)
    write(options.out, options.page)
    rows = [row for row in found.rows if row.section == section and row.fault in wanted]
    console.print(_table(rows))
    missed = [row for row in rows if row.missed or row.skipped]
    for row in missed:
        console.print(f"missed: {row.fault}: {row.skipped or '; '.join(row.missed)}", markup=False, highlight=False)
    console.print(f"{len(rows) - len(missed)} of {len(rows)} faults met all goals")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
