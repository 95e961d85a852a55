"""How the cluster does with hundreds of replicas and many gateways, all on this machine.

    python -m bench.fleet                      a peer's run: 240 workers; 1, 2, 4 and 8 gateways; random workers
    python -m bench.fleet --churn 20           120 workers, of which 20 leave and 20 new ones come
    python -m bench.fleet --minutes 30         half an hour with 8 gateways
    python -m bench.fleet --grid               the cost of one request for 1 to 50 gateways and 8 to 1 000 workers
    python -m bench.fleet --quick              a small peer's run of about a minute

Gateways and Redis are real, and clients spread their requests over the gateways at random. Workers are light replicas
(bench/fleet/replicas.py) with the product's agents. The peer is SMG. Its run is in its pull request 2438, and its
traffic in scripts/generate_sim/profiles of its repository: agents' sessions of one or two turns, 611 sessions/s on 240
workers for 180 s. A second turn repeats the first one and goes on.

This machine carries fewer sessions per second than the peer's, so runs last longer, until each worker has had as many
sessions. Without --sessions-per-s, growing rates on the largest fleet find the rate. All times of workers and clients
are stretched by the same factor (`pace`), so that each worker is as busy as the peer's.

Routers of peers (--systems) run as many processes as there are gateways. These do not know of each other.

Each line of a result says what share of follow-ups came to the worker of their session's first turn, what share of
prompt tokens was cached, what one endless cache would have found, the coefficient of variation (CoV) of requests over
workers, failures by kind, and the CPU and memory of each part. Each run starts with empty caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench import record
from bench.embedded import embedded_redis, redis_version
from bench.fleet import churn, growth, peer
from bench.fleet.gateways import NotReady
from bench.fleet.growth import Cell
from bench.fleet.peer import Run, carried_sessions_per_s, staged_for
from bench.fleet.table import growth_table, parts_table, peer_table
from bench.fleet.traffic import SHAPES
from bench.options import count, counts, names, positive
from bench.peers import PEERS
from gateway.settings.policies import DEFAULT_POLICY, POLICIES

_GATEWAYS, _GRID_GATEWAYS = [1, 2, 4, 8], [1, 8, 20, 50]
_WORKERS, _CHURN_WORKERS, _GRID_WORKERS = [240], [120], [8, 64, 240, 1000]
_QUICK = {"workers": [12], "gateways": [2], "sessions_per_worker": 30, "sessions_per_s": 50.0, "seconds": 3.0}
_QUICK_GRID = {"workers": [8, 120], "gateways": [1, 4], "sessions_per_s": 10.0}
_GRID_SESSIONS_PER_S = 10.0
_SYSTEMS = (*POLICIES, *PEERS)
_LONGEST_REASON_CHARS = 300


@dataclass
class Found:
    """The rows until now."""

    options: argparse.Namespace
    console: Console
    versions: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def leave_out(self, what: str, why: str) -> None:
        """This machine does not carry it."""
        self.console.print(f"left out: {what}: {why[:_LONGEST_REASON_CHARS]}")
        self.facts.setdefault("left_out", []).append(what)
        self.add([])

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keeps the rows, and writes all of them."""
        self.rows += rows
        record.write(self.options.out, self.rows, self.versions, **self.facts)


def _runs(found: Found) -> Iterator[Run]:
    """The runs of the peer's kind."""
    options, shape = found.options, SHAPES[found.options.shape]
    (workers,) = options.workers
    rate_per_s = options.sessions_per_s or _carried(found, workers)
    sessions = workers * (options.sessions_per_worker or shape.sessions_per_worker)
    if options.minutes:
        sessions = round(rate_per_s * 60 * options.minutes)
    for seed in range(1, options.seeds + 1):
        for gateways in options.gateways:
            for system in options.systems:
                pace, more = options.pace, {"system": system, "seed": seed}
                yield Run.at_rate(shape, workers, gateways, rate_per_s, sessions, pace, **more)
        if options.random and not (options.minutes or options.churn):
            yield Run.at_rate(shape, workers, 0, rate_per_s, sessions, options.pace, seed=seed)


def _carried(found: Found, workers: int) -> float:
    """The rate that this machine carries with the most gateways."""
    shape, gateways = SHAPES[found.options.shape], max(found.options.gateways)
    found.console.print(f"looking for the rate that {gateways} gateways and {workers} workers carry here")
    run = Run(shape, workers, gateways, 1.0, 1, peer.ENGINE, peer.STEP_PACE)
    with staged_for(run) as staged:
        rate_per_s = uvloop.run(carried_sessions_per_s(shape, staged, found.console.print))
    found.facts["carried_sessions_per_s"] = rate_per_s
    return rate_per_s


def _peer(found: Found) -> None:
    options, workers = found.options, found.options.workers
    for run in _runs(found):
        minutes = run.sessions / run.sessions_per_s / 60
        sessions = f"{run.sessions} sessions at {run.sessions_per_s:g}/s, {minutes:.1f} minutes; pace {run.pace:.3f}"
        found.console.print(f"{run.described()['system']}, {run.gateways} gateways: {sessions}")
        with staged_for(run, discovers=bool(options.churn)) as staged:
            if options.minutes or options.churn:
                found.add(uvloop.run(churn.measure_in_parts(run, staged, options.churn)))
            else:
                found.add([uvloop.run(peer.measure(run, staged))])
    title = f"{workers[0]} workers, {found.rows[0]['sessions_per_s']:g} sessions/s ({options.shape})"
    found.console.print(peer_table(found.rows, title))
    found.console.print(parts_table([row for row in found.rows if "idle" in row]))


def _grid(found: Found) -> None:
    options = found.options
    rate_per_s = options.sessions_per_s or _GRID_SESSIONS_PER_S
    too_large: list[tuple[int, int]] = []
    for gateways, workers in product(options.gateways, options.workers):
        if any(gateways >= each[0] and workers >= each[1] for each in too_large):
            found.leave_out(f"{gateways} gateways, {workers} workers", "a smaller fleet is too large here")
            continue
        cell = Cell(gateways, workers, rate_per_s, options.seconds)
        found.console.print(f"{gateways} gateways, {workers} workers")
        try:
            with staged_for(cell.run) as staged:
                found.add([uvloop.run(growth.measure(cell, staged))])
        except NotReady as error:
            too_large.append((gateways, workers))
            found.leave_out(f"{gateways} gateways, {workers} workers", str(error))
    found.console.print(growth_table(found.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--churn", type=count, default=0, metavar="N", help="N workers leave, and as many come")
    what.add_argument("--minutes", type=positive, help="one run of this length per number of gateways (default: 8)")
    what.add_argument("--grid", action="store_true", help="the cost of one request for each size of the fleet")
    parser.add_argument("--workers", type=counts, help="replicas; --grid takes several numbers, as in 8,64")
    parser.add_argument("--gateways", type=counts, help="numbers of gateways, one after another")
    parser.add_argument("--shape", choices=SHAPES, default="two-turn", help="the traffic (default: %(default)s)")
    parser.add_argument("--sessions-per-worker", type=count, help="default: as many as at the peer's (458)")
    parser.add_argument(
        "--sessions-per-s", type=positive, help="of all clients; without it, what this machine carries is found first"
    )
    parser.add_argument("--pace", type=positive, help="default: as slow as makes each worker as busy as the peer's")
    parser.add_argument(
        "--systems",
        type=names(_SYSTEMS),
        default=[DEFAULT_POLICY],
        help=f"what chooses the workers, separated by commas: {', '.join(_SYSTEMS)} (default: {DEFAULT_POLICY})",
    )
    parser.add_argument("--no-random", dest="random", action="store_false", help="without the run on random workers")
    parser.add_argument("--seeds", type=count, default=1, help="repeat all runs with other sessions")
    parser.add_argument(
        "--seconds", type=positive, default=15.0, help="of each figure of --grid (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a small fleet, and few sessions")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    return parser


def _options() -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**_QUICK | (_QUICK_GRID if options.grid else {}))
        options = parser.parse_args()
    most = [8] if options.minutes or options.churn else _GATEWAYS
    options.gateways = options.gateways or (_GRID_GATEWAYS if options.grid else most)
    several = _GRID_WORKERS if options.grid else _CHURN_WORKERS if options.churn else _WORKERS
    options.workers = options.workers or several
    if not options.grid and len(options.workers) > 1:
        parser.error("--workers: only --grid takes several numbers")
    if options.churn >= min(options.workers):
        parser.error("--churn: at least one worker must stay")
    if options.churn and PEERS.keys() & set(options.systems):
        parser.error("--churn: only KVGate's gateways follow EndpointSlices here")
    for name in PEERS.keys() & set(options.systems):
        if not PEERS[name].is_installed:
            parser.error(f"--systems: {name} is not installed; `python -m bench.overhead --install` installs it")
    return options


def main() -> None:
    record.begin()
    options = _options()
    with embedded_redis() as url:
        versions = {"kvgate": metadata.version("kvgate"), "redis": uvloop.run(redis_version(url))}
    versions |= {name: other.version for name, other in PEERS.items() if name in options.systems}
    found = Found(options, Console(), versions)
    (_grid if options.grid else _peer)(found)


if __name__ == "__main__":
    main()
