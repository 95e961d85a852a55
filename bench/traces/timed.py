"""The CPU time of gateways, with none of their requests traced, one in a hundred, one in ten.

Two gateways run, one without `tracing.endpoint`. They share one processor and get requests at the same time, so that
whatever disturbs one disturbs the other. They drive each other's data out of the caches, as other programs do on a busy
machine. Everything else runs on the other processors. `sample_ratio` is 0: the client decides with a `traceparent`
which requests are traced. In the first turns of a start, none is. Each turn has so many requests that whole batches of
spans leave. One in two of the batches of "1 in 100" is the first of its process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from bench import record, tables
from bench.cluster import KVGATE, running_gateways
from bench.overhead.client import closed_loop
from bench.overhead.shapes import ANSWERS, Answer
from bench.overhead.upstreams import set_answer, upstreams
from bench.threaded_server import in_thread
from bench.traces.loads import BATCH, ENVIRONMENT, GOAL, HUNDREDTH, NONE, OFF, REQUESTS, TENTH, Load, Receiver, ratio
from bench.trees import cpu_s

UNTOUCHED = Load("none yet")
"""Before the first request is traced."""
TURNS = (UNTOUCHED, UNTOUCHED, HUNDREDTH, NONE, NONE, HUNDREDTH, TENTH)
"""Of a start."""
LOADS = tuple(dict.fromkeys(TURNS))
_WARMS_UP = (UNTOUCHED,) * 3
"""A gateway's memory grows in its first 10 000 requests or so."""
_LONGEST_S = 100.0
"""A turn on a slow machine."""


class OneProcessor(Exception):
    """This machine has no second one."""


@dataclass(frozen=True)
class Row:
    """A load of the gateway with traces in one start."""

    answer: str
    start: int
    load: str
    requests: int
    cpu_us: float
    """The gateway's CPU time per request."""
    off_requests: int
    off_cpu_us: float
    """Of the gateway without traces, at the same time."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gateway:
    """One that runs alone with its store."""

    url: str
    pid: int

    def pin(self, processor: int) -> None:
        """From now on, all its threads run there."""
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {processor})


@dataclass(frozen=True)
class Work:
    """What a gateway did in a turn, or in several."""

    requests: int
    cpu_s: float

    def __add__(self, other: Work) -> Work:
        return Work(self.requests + other.requests, self.cpu_s + other.cpu_s)

    @property
    def cpu_us(self) -> float:
        """For each request."""
        return round(self.cpu_s / self.requests * 1e6, 1)


NOTHING = Work(0, 0.0)


@contextmanager
def gateway(servers: Sequence[str], tracing: dict[str, Any] | None) -> Iterator[Gateway]:
    """Inside the context, one gateway runs in front of these servers."""
    urls = {f"r{index}": url for index, url in enumerate(servers)}
    config = {"tracing": tracing} if tracing else None
    command = ("env", *ENVIRONMENT, *KVGATE)
    with running_gateways(urls, gateways=1, config=config, kvgate=command) as cluster:
        yield Gateway(cluster.gateway_urls[0], cluster.gateway_processes[0].pid)


async def turn(pair: Sequence[Gateway], answer: Answer, load: Load, receiver: Receiver, connections: int) -> list[Work]:
    """Both gateways get requests, the second one this load. Raises RuntimeError if a request failed, or spans did not
    come."""
    batches = receiver.batches + (REQUESTS // load.every // BATCH if load.every else 0)
    before_s = [cpu_s([one.pid]) for one in pair]
    off, on = OFF.requests(answer), load.requests(answer)
    found = await asyncio.gather(
        *(
            closed_loop([one.url], requests, connections, _LONGEST_S, lambda: on.sent >= REQUESTS)
            for one, requests in zip(pair, (off, on), strict=True)
        )
    )
    for measured in found:
        measured.check()
    await asyncio.to_thread(receiver.wait_for, batches)
    took_s = [cpu_s([one.pid]) - began_s for one, began_s in zip(pair, before_s, strict=True)]
    return [Work(measured.done, took) for measured, took in zip(found, took_s, strict=True)]


def measured(
    start: int, answer: Answer, pair: Sequence[Gateway], receiver: Receiver, options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each load."""

    def works(load: Load) -> list[Work]:
        return asyncio.run(turn(pair, answer, load, receiver, options.connections))

    for load in _WARMS_UP:
        works(load)
    found = {load: [NOTHING, NOTHING] for load in LOADS}
    for load in TURNS:
        found[load] = [work + more for work, more in zip(found[load], works(load), strict=True)]
    for load, (off, on) in found.items():
        yield Row(answer.name, start, load.name, on.requests, on.cpu_us, off.requests, off.cpu_us)


def of_one_start(
    start: int, answer: Answer, options: argparse.Namespace, servers: Sequence[str], processor: int
) -> Iterator[Row]:
    """A row for each load. Every other start begins with the other gateway."""
    set_answer(servers[0], answer)
    with ExitStack() as stack:
        receiver = stack.enter_context(in_thread(Receiver()))
        tracings = None, {"endpoint": receiver.url, "sample_ratio": 0}
        pair = [stack.enter_context(gateway(servers, each)) for each in tracings[:: -1 if start % 2 else 1]]
        for one in pair:
            one.pin(processor)
        yield from measured(start, answer, pair[:: -1 if start % 2 else 1], receiver, options)


def run(options: argparse.Namespace, found: record.Found[Row]) -> None:
    """Measures in `starts` starts of the gateways. Raises OneProcessor."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        raise OneProcessor("the gateways need a processor, and everything else another one")
    with ExitStack() as stack:
        os.sched_setaffinity(0, processors[1:])
        servers = stack.enter_context(upstreams())
        progress = stack.enter_context(record.progress(found.console))
        task = progress.add_task("measuring", total=options.starts * len(options.answers))
        for start, name in product(range(options.starts), options.answers):
            found.rows += of_one_start(start, ANSWERS[name], options, servers, processors[0])
            found.save()
            progress.advance(task)


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "CPU of a gateway for each request",
        ("answer", "traces"),
        ("us", "off", "beside off", f"beside {UNTOUCHED.name}"),
        caption=f"goal with 1 in 100: at most {GOAL} times that of a gateway without traces",
    )
    for answer in dict.fromkeys(row.answer for row in rows):
        mine = [row for row in rows if row.answer == answer]
        beside_off = {(row.start, row.load): row.cpu_us / row.off_cpu_us for row in mine}
        off = {(start, OFF.name): 1.0 for start, _ in beside_off}
        for load in LOADS:
            of_load = [row for row in mine if row.load == load.name]
            cpu_us, off_cpu_us = mean(row.cpu_us for row in of_load), mean(row.off_cpu_us for row in of_load)
            itself = "" if load is UNTOUCHED else str(ratio(beside_off, load, UNTOUCHED))
            beside = str(ratio(beside_off | off, load, OFF))
            drawn.add_row(
                answer if load is UNTOUCHED else "", load.name, f"{cpu_us:.0f}", f"{off_cpu_us:.0f}", beside, itself
            )
    return drawn
