"""The CPU time of gateways, with none of their requests traced, one in a hundred, one in ten.

Two gateways run, one without `tracing.endpoint`. The other one gets all shares by turns. `sample_ratio` is 0 there: the
client decides with a `traceparent` which requests are traced. Turns are short, because a machine is faster in one
minute than in the next. What a gateway does just after another one's turn is not counted: its code and data have left
the CPU's caches. A batch of spans is sent only when it is whole, and counts in the turn that fills it. By default, a
gateway with fewer requests than here sends smaller batches, every 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from rich.table import Table

from bench import record, tables
from bench.cluster import KVGATE, running_gateways
from bench.overhead.client import closed_loop
from bench.overhead.shapes import ANSWERS, Answer
from bench.overhead.upstreams import set_answer, upstreams
from bench.threaded_server import in_thread
from bench.traces.loads import GOAL, LOADS, NONE, OFF, TENTH, WHOLE_BATCHES, Load, Receiver, in_turns, ratio
from bench.trees import cpu_s
from gateway.tracing.otel_variables import NO_VARIABLES

_WARMS_UP_S = 3.0
"""A gateway's memory grows in its first 10 000 requests or so."""
_WARMS_UP_AGAIN_S = 0.3
"""In each turn, with the same load."""
_BATCH = NO_VARIABLES.batch


@dataclass(frozen=True)
class Row:
    """One load in one start."""

    answer: str
    start: int
    load: str
    requests: int
    cpu_us: float
    """The gateway's CPU time per request."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gateway:
    """One that runs alone with its store."""

    url: str
    pid: int


@contextmanager
def gateway(servers: Sequence[str], tracing: dict[str, Any] | None) -> Iterator[Gateway]:
    """Inside the context, one gateway runs in front of these servers."""
    urls = {f"r{index}": url for index, url in enumerate(servers)}
    config = {"tracing": tracing} if tracing else None
    command = ("env", WHOLE_BATCHES, *KVGATE)
    with running_gateways(urls, gateways=1, config=config, kvgate=command) as cluster:
        yield Gateway(cluster.gateway_urls[0], cluster.gateway_processes[0].pid)


def turn(one: Gateway, answer: Answer, load: Load, connections: int, seconds: float) -> tuple[int, float]:
    """How many requests were answered, and the gateway's CPU time for them, in seconds. Raises RuntimeError if one
    failed."""
    requests = load.requests(answer)
    warming = asyncio.run(closed_loop([one.url], requests, connections, _WARMS_UP_AGAIN_S))
    before_s = cpu_s([one.pid])
    found = asyncio.run(closed_loop([one.url], requests, connections, seconds))
    if warming.failed or found.failed or not found.done:
        raise RuntimeError(f"{warming.failed + found.failed} requests failed, {found.done} were answered")
    return found.done, cpu_s([one.pid]) - before_s


def measured(
    start: int, answer: Answer, gateways: Mapping[Load, Gateway], receiver: Receiver, options: argparse.Namespace
) -> list[Row]:
    """A row for each load. Raises RuntimeError if spans did not come while they were measured."""
    for load in (OFF, TENTH):
        turn(gateways[load], answer, load, options.connections, _WARMS_UP_S)
    before = receiver.batches
    done, took_s = dict.fromkeys(LOADS, 0), dict.fromkeys(LOADS, 0.0)
    for load in in_turns(start, options.rounds):
        requests, cpu = turn(gateways[load], answer, load, options.connections, options.seconds)
        done[load] += requests
        took_s[load] += cpu
    traced = sum(done[load] // load.every for load in LOADS if load.every)
    if receiver.batches - before < max(1, traced // _BATCH - 1):
        raise RuntimeError(f"{traced} requests were traced, and {receiver.batches - before} batches of spans came")
    return [Row(answer.name, start, load.name, done[load], round(took_s[load] / done[load] * 1e6, 1)) for load in LOADS]


def of_one_start(start: int, options: argparse.Namespace, servers: Sequence[str]) -> Iterator[Row]:
    """A row for each answer and load."""
    with ExitStack() as stack:
        receiver = stack.enter_context(in_thread(Receiver()))
        off = stack.enter_context(gateway(servers, None))
        on = stack.enter_context(gateway(servers, {"endpoint": receiver.url, "sample_ratio": 0}))
        gateways = {load: on if load.has_tracing else off for load in LOADS}
        for answer in (ANSWERS[name] for name in options.answers):
            set_answer(servers[0], answer)
            yield from measured(start, answer, gateways, receiver, options)


def run(options: argparse.Namespace, found: record.Found[Row]) -> None:
    """Measures in `starts` starts of the gateways."""
    with ExitStack() as stack:
        servers = stack.enter_context(upstreams())
        progress = stack.enter_context(record.progress(found.console))
        rows = options.starts * len(options.answers) * len(LOADS)
        task = progress.add_task("measuring", total=rows)
        for start in range(options.starts):
            for row in of_one_start(start, options, servers):
                found.rows.append(row)
                progress.advance(task)


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "CPU of a gateway for each request",
        ("answer", "traces"),
        ("us", f"beside {OFF.name}", f"beside {NONE.name}"),
        caption=f"goal with 1 in 100: at most {GOAL} times that of a gateway without traces",
    )
    for answer in dict.fromkeys(row.answer for row in rows):
        costs = {(row.start, row.load): row.cpu_us for row in rows if row.answer == answer}
        for load in LOADS:
            cpu_us = mean(cost for (_, name), cost in costs.items() if name == load.name)
            off = "" if load is OFF else str(ratio(costs, load, OFF))
            none = str(ratio(costs, load, NONE)) if load.every else ""
            drawn.add_row(answer if load is OFF else "", load.name, f"{cpu_us:.0f}", off, none)
    return drawn
