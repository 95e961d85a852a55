"""How fairly do tenants share replicas that have less room than they ask for?

    python -m bench.fairness [--out FILE]
    python -m bench.fairness --parts shares --gateways 1,4 --seconds 10

shares      three tenants ask for 1.5, 2 and 3 times what the replicas can do. Also on KVGate without a queue, and on
            other routers (`python -m bench.overhead --install`)
priorities  TTFT of the first band alone, and beside others that ask for more than there is

The docstrings of bench/fairness/*.py describe each load. `idle` is the idle share of the machine. If it is close to 0,
the machine was the limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import record
from bench.fairness import priorities, shares
from bench.fairness.row import Row
from bench.options import count, counts, names
from bench.peers import PEERS, DoesNotStart

_ROUTERS = ("sglang-router", "vllm-router")


class Parts:
    """The parts of a run, with its options."""

    def __init__(self, options: argparse.Namespace, found: record.Found[Row]) -> None:
        self._options, self._found = options, found

    def shares(self) -> Iterator[Row]:
        yield from shares.measure(self._options.gateways, self._options.seconds)
        for name in self._options.peers:
            if not PEERS[name].is_installed:
                self._found.leave_out(f"{name}: python -m bench.overhead --install installs it")
                continue
            try:
                yield from shares.measure_peer(PEERS[name], self._options.seconds)
            except DoesNotStart as error:
                self._found.leave_out(f"{name}: {error}")

    def priorities(self) -> Iterator[Row]:
        return priorities.measure(self._options.gateways, 2 * self._options.seconds)


_TABLES: Mapping[str, Callable[[Sequence[Row]], Table]] = {
    "shares": shares.table,
    "priorities": priorities.table,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=names(_TABLES), default=",".join(_TABLES), help="default: %(default)s")
    parser.add_argument("--gateways", type=counts, default="1,2,4,8", help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=count,
        default=30,
        help="that count in each run; of priorities, twice as many (default: %(default)s)",
    )
    parser.add_argument(
        "--peers", type=names(_ROUTERS), default=",".join(_ROUTERS), help="beside shares (default: %(default)s)"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[], help="no other routers")
    parser.add_argument("--out", type=Path, help="write the rows as JSON, after each of them")
    return parser.parse_args()


def main() -> None:
    record.begin()
    options = _options()
    versions = {"kvgate": metadata.version("kvgate")} | {name: PEERS[name].version for name in options.peers}
    found = record.Found[Row](versions, options.out, Console(width=160))
    parts = Parts(options, found)
    for part in options.parts:
        rows: list[Row] = []
        for row in getattr(parts, part)():
            rows.append(row)
            found.rows.append(row)
            found.save()
            found.console.print(f"{part}: {row.verdict}" + "".join(f"; missed: {goal}" for goal in row.missed))
        found.console.print(_TABLES[part](rows))


if __name__ == "__main__":
    main()
