"""Measures what traces cost a gateway for each request, with none traced, one in a hundred, one in ten.

    python -m bench.traces [--starts 60] [--connections 8] [--answers plain] [--out FILE]
    python -m bench.traces --simulated [--starts 1]      on a simulated CPU, which needs Valgrind; 16 minutes a start

Gateways run in front of servers whose answers are prepared. A batch of spans is a quarter of the default, which makes a
trace a little dearer. The first command measures CPU time, beside that of a gateway without traces at the same time.
Two processes of one program differ by some percent, so errors are standard errors over `--starts`. "Beside none yet"
compares a process with what it was before its first trace. The second command counts instructions and cache misses,
which other work on the machine hardly changes. It compares one in a hundred.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from bench import record
from bench.options import count, names
from bench.overhead.shapes import ANSWERS
from bench.simulated_cpu import NoValgrind
from bench.traces import counted, timed


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="count instructions and cache misses")
    parser.add_argument("--starts", type=count, help="of the gateways (default: 60; simulated: 1)")
    parser.add_argument("--connections", type=count, default=8, help="to each gateway (default: %(default)s)")
    parser.add_argument("--answers", type=names(ANSWERS), default="plain", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    options.starts = options.starts or (1 if options.simulated else 60)
    try:
        _count(options) if options.simulated else _time(options)
    except (NoValgrind, timed.OneProcessor) as error:
        parser.error(str(error))


def _time(options: argparse.Namespace) -> None:
    found = record.Found[timed.Row]({}, options.out, Console())
    timed.run(options, found)
    found.console.print(timed.table(found.rows))
    found.save()


def _count(options: argparse.Namespace) -> None:
    found = record.Found[counted.Row]({}, options.out, Console())
    counted.run(options, found)
    found.console.print(counted.table(found.rows))
    found.save()


if __name__ == "__main__":
    main()
