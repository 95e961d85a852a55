"""What hostile requests and lying replicas cost a gateway, and an honest client beside them.

    python -m bench.attacks [--only form-60k,jpeg-1m] [--out FILE]

Each attack is made on a gateway that is warmed up, with a Redis of its own and three replicas that lie when the prompt
says so. Meanwhile another process asks /health every 5 ms, sends a small chat every 20 ms from another address
(127.0.0.2), and looks at the memory of the gateway and of the processes that it started. It goes on until memory is
back, or for 10 s after the attack. An attack is ended when it has no answer after --cap-s, or when the gateway takes
more than --cap-mb; that is the result then. A gateway that was harmed is replaced by a fresh one.

Goals: nothing holds /health for more than 50 ms, memory comes back within 20 MB, the honest client is never refused.
Some attacks have a goal of their own as well. The time that the gateway or the probe waited for a core is part of
/health's delay, but does not count as held; still, use a machine that does nothing else. The exit status is 1 where a
goal is missed.

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
"""A thousand connections need as many, on both sides; the gateway inherits what is allowed here."""


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
    """One after the other; what is found is saved after each."""
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
        "--only", type=names(ATTACKS), default=list(ATTACKS), metavar="NAME,…", help="these (default: all)"
    )
    parser.add_argument(
        "--idle-s", type=positive, default=2.0, help="watched before each attack (default: %(default)s)"
    )
    parser.add_argument("--cap-s", type=positive, default=60.0, help="an attack may take (default: %(default)s)")
    parser.add_argument("--cap-mb", type=positive, default=3000.0, help="a gateway may take (default: %(default)s)")
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
