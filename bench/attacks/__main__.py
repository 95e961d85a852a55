"""Measures how hostile requests and lying replicas affect a gateway and an honest client.

    python -m bench.attacks [--only form-60k,jpeg-1m] [--out FILE]

Each attack runs against a gateway that is warmed up. The gateway has its own Redis and three replicas, which lie when
the prompt asks for it. During the attack another process asks /health every 5 ms, sends a small chat every 20 ms from
another address (127.0.0.2), and measures the memory of the gateway and of its child processes. It goes on until memory
is back, or for 10 s after the attack. An attack ends early if it has no answer after --cap-s, or if the gateway takes
more than --cap-mb; the row then says so. If an attack harms the gateway, the next attack gets a fresh one.

Goals: no delay of /health over 50 ms, memory back within 20 MB, the honest client is never refused. Some attacks also
have their own goal. The time that the gateway or the probe waits for a core is part of /health's delay, but does not
count as held. Still, use a machine that does nothing else. The exit status is 1 if a goal is missed.

The attacks:
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
from contextlib import suppress
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.attacks.arena import Arena, lying_replicas
from bench.attacks.measure import Caps, WitnessFailed, measure
from bench.attacks.row import Row
from bench.attacks.table import ATTACKS
from bench.options import names, positive
from gateway import __version__

_OPEN_FILES = 8192
"""A thousand connections need this many on both sides. The gateway inherits the limit that is set here."""


def _attacked(name: str, arena: Arena, caps: Caps) -> Row:
    attack = ATTACKS[name]
    try:
        row = asyncio.run(measure(name, attack, arena.target(attack.settings), caps))
        if row.missed:
            arena.discard()
    except (RuntimeError, OSError, httpx.HTTPError, WitnessFailed) as error:
        problem = f"could not be measured: {type(error).__name__}: {error}"
        row = Row(name, attack.sentence, problem, is_alive=False, missed=(problem,))
        with suppress(OSError):
            arena.discard()
    return row


def run(wanted: list[str], caps: Caps, found: record.Found[Row]) -> None:
    """Runs the attacks one after another. Saves the results after each."""
    with lying_replicas() as replicas, Arena(replicas) as arena, record.progress(found.console) as progress:
        task = progress.add_task("", total=len(wanted))
        for name in wanted:
            progress.update(task, description=name)
            row = _attacked(name, arena, caps)
            found.rows.append(row)
            found.save()
            found.console.print(f"{name}: {'; '.join(row.missed) or 'met'}", markup=False, highlight=False)
            progress.advance(task)


def _table(rows: list[Row]) -> Table:
    columns = ("idle ms", "/health ms", "held ms", "before MB", "peak MB", "after MB")
    title = "What attacks cost: delays of /health, memory of the gateway, answers"
    caption = "idle: before the attack; held: /health without what was waiting for a core"
    table = tables.table(title, ("attack", "the client got", "an honest one got"), columns, caption)
    for row in rows:
        figures = (row.idle_ms, row.health_ms, row.held_ms, row.before_mb, row.peak_mb, row.after_mb)
        table.add_row(row.attack, row.got, row.honest, *(f"{figure:.0f}" for figure in figures))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks",
        description=(__doc__ or "") + "".join(f"\n  {name:<16} {one.sentence}" for name, one in ATTACKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=names(ATTACKS), default=list(ATTACKS), metavar="NAME,…", help="attacks to run (default: all)"
    )
    parser.add_argument(
        "--idle-s", type=positive, default=2.0, help="seconds of watching before each attack (default: %(default)s)"
    )
    parser.add_argument("--cap-s", type=positive, default=60.0, help="longest time of an attack (default: %(default)s)")
    parser.add_argument("--cap-mb", type=positive, default=3000.0, help="a gateway's memory cap (default: %(default)s)")
    parser.add_argument("--out", "--json", type=Path, metavar="FILE", help="write the rows as JSON, after each attack")
    return parser.parse_args()


def main() -> None:
    record.begin()
    options, console = _options(), Console()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, hard), hard))
    found = record.Found[Row]({"kvgate": __version__}, options.out, console)
    run(options.only, Caps(options.cap_s, options.cap_mb, options.idle_s), found)
    console.print(_table(found.rows))
    missed = [row for row in found.rows if row.missed]
    for row in missed:
        console.print(f"missed: {row.attack}: {'; '.join(row.missed)}", markup=False, highlight=False)
    console.print(f"{len(found.rows) - len(missed)} of {len(found.rows)} attacks met all goals")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
