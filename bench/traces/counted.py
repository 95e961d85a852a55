"""The same loads on a simulated CPU, which counts instructions and cache misses (bench/simulated_cpu.py).

A machine whose other work disturbs a measurement of time by percents counts the same. Gateways are slow there, so they
get as long as they need for Redis, and a batch of spans is a quarter of the default, which makes each trace a little
dearer: the traced requests fill at least one in each of their turns. What a gateway does without requests, such as its
heartbeats, counts some 50 times as much as elsewhere, with traces and without.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
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
from bench.traces.loads import GOAL, HUNDREDTH, NONE, OFF, Load, Receiver, ratio
from gateway.tracing.otel_variables import NO_VARIABLES

_BATCH = NO_VARIABLES.batch // 4
_ENVIRONMENT = ("env", "OTEL_BSP_SCHEDULE_DELAY=100000000", f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE={_BATCH}")
_SLOW = {"redis": {"budget_ms": 60_000, "overdue_ms": 60_000}, "health": {"timeout_s": 30}}
_TURNS = (OFF, NONE, OFF, HUNDREDTH, HUNDREDTH, OFF, NONE, OFF)
"""Both gateways get about as many requests: their memory grows in the first 10 000 or so."""
_LOADS = (OFF, NONE, HUNDREDTH)
_LEAST_REQUESTS = 1600
"""In a turn."""
_WARMS_UP_REQUESTS = 1600
_PIECE_S = 30.0


@dataclass(frozen=True)
class Row:
    """One turn of a load. The counts are per request."""

    answer: str
    start: int
    turn: int
    load: str
    requests: int
    instructions: float
    l1_misses: float
    last_misses: float
    cycles: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gateway:
    """One that runs on a simulated CPU."""

    url: str
    pid: int
    cpu: SimulatedCpu

    def turn(self, answer: Answer, load: Load, least: int, connections: int) -> tuple[int, Counts]:
        """At least so many requests: their number, and the counts. Raises RuntimeError if one failed."""
        requests, done = load.requests(answer), 0
        self.cpu.take(self.pid)
        while done < least:
            found = asyncio.run(closed_loop([self.url], requests, connections, _PIECE_S))
            if found.failed or not found.done:
                raise RuntimeError(f"{found.failed} requests failed, {found.done} were answered")
            done += found.done
        return done, self.cpu.take(self.pid)


@contextmanager
def gateway(servers: Sequence[str], tracing: dict[str, Any] | None) -> Iterator[Gateway]:
    """Inside the context, one gateway runs in front of these servers, with a Redis of its own."""
    urls = {f"r{index}": url for index, url in enumerate(servers)}
    config = _SLOW | ({"tracing": tracing} if tracing else {})
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder, embedded_redis() as redis_url:
        cpu = SimulatedCpu(Path(folder))
        with running_gateways(1, urls, 0, redis_url, config, under=(*_ENVIRONMENT, *cpu.command)) as (one,):
            cpu.begin(one.process.pid)
            yield Gateway(one.url, one.process.pid, cpu)


def counted(
    start: int, answer: Answer, gateways: Mapping[Load, Gateway], receiver: Receiver, options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each turn. Raises RuntimeError if spans did not come."""
    for load in (OFF, HUNDREDTH):
        gateways[load].turn(answer, load, _WARMS_UP_REQUESTS, options.connections)
    for number, load in enumerate(_TURNS):
        before = receiver.batches
        least = max(_LEAST_REQUESTS, load.every * _BATCH)
        done, counts = gateways[load].turn(answer, load, least, options.connections)
        if load.every and receiver.batches == before:
            raise RuntimeError("no batch of spans came")
        totals = (counts.instructions, counts.l1_misses, counts.last_misses, counts.cycles)
        yield Row(answer.name, start, number, load.name, done, *(round(each / done, 1) for each in totals))


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
                gateways = {load: on if load.has_tracing else off for load in _LOADS}
                for answer in (ANSWERS[name] for name in options.answers):
                    set_answer(servers[0], answer)
                    for row in counted(start, answer, gateways, receiver, options):
                        found.rows.append(row)
                        progress.advance(task)
            found.save()


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "a gateway's work for each request, on a simulated CPU",
        ("answer", "traces"),
        ("1000 instructions", "misses of L1", "of the last cache", "cycles beside off"),
        caption=f"goal with 1 in 100: at most {GOAL} times the estimated cycles of a gateway without traces",
    )
    for answer in dict.fromkeys(row.answer for row in rows):
        of_answer = [row for row in rows if row.answer == answer]
        costs = {
            (start, load.name): mean(row.cycles for row in of_answer if (row.start, row.load) == (start, load.name))
            for start in {row.start for row in rows}
            for load in _LOADS
        }
        for load in _LOADS:
            of_load = [row for row in of_answer if row.load == load.name]
            drawn.add_row(
                answer if load is OFF else "",
                load.name,
                f"{mean(row.instructions for row in of_load) / 1000:.1f}",
                f"{mean(row.l1_misses for row in of_load):.0f}",
                f"{mean(row.last_misses for row in of_load):.0f}",
                "" if load is OFF else str(ratio(costs, load, OFF)),
            )
    return drawn
