"""The work of gateways on a simulated CPU, which counts instructions and cache misses (bench/simulated_cpu.py): without
traces, and with one request in a hundred traced.

Other work on the machine, which disturbs a measurement of time by percents, hardly matters here. Gateways are slow,
so they get as long as they need for Redis, and what they do without requests, such as heartbeats, counts as much as the
requests. So each is also counted without requests, and that is taken off. Each turn has a whole batch of spans. Both
gateways get as many requests, because their memory grows in the first 10 000 or so.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from bench import record, tables
from bench.embedded import embedded_redis
from bench.fleet.gateways import running_gateways
from bench.overhead.client import closed_loop
from bench.overhead.shapes import ANSWERS, Answer
from bench.overhead.upstreams import set_answer, upstreams
from bench.simulated_cpu import Counts, SimulatedCpu
from bench.threaded_server import in_thread
from bench.traces.loads import ENVIRONMENT, GOAL, HUNDREDTH, OFF, REQUESTS, Load, Receiver, ratio

_SLOW = {"redis": {"budget_ms": 60_000, "overdue_ms": 60_000}, "health": {"timeout_s": 30, "interval_s": 30}}
_TURNS = (OFF, HUNDREDTH, HUNDREDTH, OFF)
_WARMS_UP_REQUESTS = 1600
_PIECE_S = 30.0
_IDLE_S = 30.0


@dataclass(frozen=True)
class Row:
    """One turn of a load. The counts are per request."""

    answer: str
    start: int
    turn: int
    load: str
    requests: int
    seconds: float
    instructions: float
    l1_misses: float
    last_misses: float
    cycles: float
    idle_cycles: float
    """Those that were taken off."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gateway:
    """One that runs on a simulated CPU."""

    url: str
    pid: int
    cpu: SimulatedCpu

    def turn(self, answer: Answer, load: Load, least: int, connections: int) -> tuple[int, float, Counts]:
        """At least so many requests: their number, the seconds, and the counts. Raises RuntimeError if one failed."""
        requests, done, began_s = load.requests(answer), 0, time.monotonic()
        self.cpu.take(self.pid)
        while done < least:
            found = asyncio.run(closed_loop([self.url], requests, connections, _PIECE_S))
            found.check()
            done += found.done
        return done, time.monotonic() - began_s, self.cpu.take(self.pid)

    def idle(self) -> Counts:
        """What it does in _IDLE_S without requests."""
        self.cpu.take(self.pid)
        select.select([], [], [], _IDLE_S)
        return self.cpu.take(self.pid)


@contextmanager
def gateway(servers: Sequence[str], tracing: dict[str, Any] | None) -> Iterator[Gateway]:
    """Inside the context, one gateway runs in front of these servers, with a Redis of its own."""
    urls = {f"r{index}": url for index, url in enumerate(servers)}
    config = _SLOW | ({"tracing": tracing} if tracing else {})
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder, embedded_redis() as redis_url:
        cpu = SimulatedCpu(Path(folder))
        with running_gateways(1, urls, 0, redis_url, config, under=("env", *ENVIRONMENT, *cpu.command)) as (one,):
            cpu.begin(one.process.pid)
            yield Gateway(one.url, one.process.pid, cpu)


def counted(
    start: int, answer: Answer, gateways: Mapping[Load, Gateway], receiver: Receiver, options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each turn. Raises RuntimeError if spans did not come."""
    idle = {}
    for load, one in gateways.items():
        one.turn(answer, load, _WARMS_UP_REQUESTS, options.connections)
        idle[load] = one.idle()
    for number, load in enumerate(_TURNS):
        before = receiver.batches
        done, seconds, counts = gateways[load].turn(answer, load, REQUESTS, options.connections)
        if load.every and receiver.batches == before:
            raise RuntimeError("no batch of spans came")
        idle_cycles = idle[load].cycles * seconds / _IDLE_S
        instructions, l1_misses, last_misses, cycles = (
            round((getattr(counts, name) - getattr(idle[load], name) * seconds / _IDLE_S) / done, 1)
            for name in ("instructions", "l1_misses", "last_misses", "cycles")
        )
        yield Row(
            *(answer.name, start, number, load.name, done, round(seconds, 1)),
            *(instructions, l1_misses, last_misses, cycles, round(idle_cycles / done, 1)),
        )


def run(options: argparse.Namespace, found: record.Found[Row]) -> None:
    """Counts in `starts` starts of the gateways."""
    with ExitStack() as whole:
        servers = whole.enter_context(upstreams())
        progress = whole.enter_context(record.progress(found.console))
        task = progress.add_task("counting", total=options.starts * len(options.answers) * len(_TURNS))
        for start in range(options.starts):
            with ExitStack() as stack:
                receiver = stack.enter_context(in_thread(Receiver()))
                off = stack.enter_context(gateway(servers, None))
                on = stack.enter_context(gateway(servers, {"endpoint": receiver.url, "sample_ratio": 0}))
                for answer in (ANSWERS[name] for name in options.answers):
                    set_answer(servers[0], answer)
                    for row in counted(start, answer, {OFF: off, HUNDREDTH: on}, receiver, options):
                        found.rows.append(row)
                        progress.advance(task)
            found.save()


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "a gateway's work for each request, on a simulated CPU",
        ("answer", "traces"),
        ("1000 instructions", "misses of L1", "of the last cache", "1000 cycles", "beside off"),
        caption=f"goal: at most {GOAL} times the estimated cycles of a gateway without traces",
    )
    for answer in dict.fromkeys(row.answer for row in rows):
        of_answer = [row for row in rows if row.answer == answer]
        costs = {
            (start, load.name): mean(row.cycles for row in of_answer if (row.start, row.load) == (start, load.name))
            for start in {row.start for row in rows}
            for load in (OFF, HUNDREDTH)
        }
        for load in (OFF, HUNDREDTH):
            of_load = [row for row in of_answer if row.load == load.name]
            drawn.add_row(
                answer if load is OFF else "",
                load.name,
                f"{mean(row.instructions for row in of_load) / 1000:.1f}",
                f"{mean(row.l1_misses for row in of_load):.0f}",
                f"{mean(row.last_misses for row in of_load):.0f}",
                f"{mean(row.cycles for row in of_load) / 1000:.0f}",
                "" if load is OFF else str(ratio(costs, load, OFF)),
            )
    return drawn
