"""Measures what traces cost a gateway: its CPU time for each request, with none traced, one in a hundred, one in ten.

    python -m bench.traces [--starts 36] [--rounds 3] [--seconds 0.5] [--connections 8] [--answers plain] [--out FILE]

Two gateways run in front of servers whose answers are prepared, one without `tracing.endpoint`. The other one gets all
shares by turns. `sample_ratio` is 0 there: the client decides with a `traceparent` which requests are traced. Turns are
short, because a machine is faster in one minute than in the next. What a gateway does just after another one's turn is
not counted: its code and data have left the CPU's caches. A batch of spans is sent only when it is whole, and counts
in the turn that fills it. By default, a gateway with fewer requests than here sends smaller batches, every 5 s. Two
processes of one program differ by some percent, so errors are standard errors over `--starts`; "beside none" compares
turns of one process, so it does not show what a traced request may leave behind for good.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.server import ThreadingHTTPServer
from itertools import count as numbers
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.cluster import KVGATE, running_gateways
from bench.options import count, names, positive
from bench.overhead.client import Payload, closed_loop
from bench.overhead.shapes import ANSWERS, Answer, payload
from bench.overhead.upstreams import set_answer, upstreams
from bench.threaded_server import SilentHandler, in_thread
from bench.trees import cpu_s
from gateway.tracing.otel_variables import NO_VARIABLES

GOAL = 1.02
"""With one request in a hundred traced."""
_PROMPT = "350 B"
_WARMS_UP_S = 3.0
"""A gateway's memory grows in its first 10 000 requests or so."""
_WARMS_UP_AGAIN_S = 0.3
"""In each turn, with the same load."""
_NEVER_MS = 10**8
_BATCH = NO_VARIABLES.batch


class _Taker(SilentHandler):
    """Takes spans, and forgets them."""

    server: Receiver

    def do_POST(self) -> None:  # noqa: N802 (the name that http.server calls)
        self.rfile.read(int(self.headers["content-length"]))
        self.server.batches += 1
        self.send_response(200)
        self.end_headers()


class Receiver(ThreadingHTTPServer):
    """Counts the batches of spans that come."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.batches = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class SomeTraced(Payload):
    """The same requests. One in `every` asks to be traced."""

    def __init__(self, requests: Payload, every: int) -> None:
        self._requests = requests
        self._every = every
        self._numbers = numbers(1)

    def next(self) -> bytes:
        request = self._requests.next()
        if next(self._numbers) % self._every:
            return request
        parent = f"traceparent: 00-{random.randbytes(16).hex()}-{random.randbytes(8).hex()}-01"
        return request.replace(b"\r\n", f"\r\n{parent}\r\n".encode(), 1)


@dataclass(frozen=True)
class Load:
    """What is compared."""

    name: str
    has_tracing: bool
    every: int = 0
    """One request in so many is traced; 0: none."""


OFF = Load("off", has_tracing=False)
NONE = Load("none", has_tracing=True)
HUNDREDTH = Load("1 in 100", has_tracing=True, every=100)
TENTH = Load("1 in 10", has_tracing=True, every=10)
LOADS = (OFF, NONE, HUNDREDTH, TENTH)


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
class Ratio:
    """How many times the CPU of another load, as a mean over starts, and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


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
    command = ("env", f"OTEL_BSP_SCHEDULE_DELAY={_NEVER_MS}", *KVGATE)
    with running_gateways(urls, gateways=1, config=config, kvgate=command) as cluster:
        yield Gateway(cluster.gateway_urls[0], cluster.gateway_processes[0].pid)


def turn(one: Gateway, answer: Answer, every: int, connections: int, seconds: float) -> tuple[int, float]:
    """How many requests were answered, and the gateway's CPU time for them, in seconds. Raises RuntimeError if one
    failed."""
    requests = payload(_PROMPT, answer)
    load = SomeTraced(requests, every) if every else requests
    warming = asyncio.run(closed_loop([one.url], load, connections, _WARMS_UP_AGAIN_S))
    before_s = cpu_s([one.pid])
    found = asyncio.run(closed_loop([one.url], load, connections, seconds))
    if warming.failed or found.failed or not found.done:
        raise RuntimeError(f"{warming.failed + found.failed} requests failed, {found.done} were answered")
    return found.done, cpu_s([one.pid]) - before_s


def in_turns(start: int, rounds: int) -> tuple[Load, ...]:
    """All loads there and back, `rounds` times. Each start begins with another load."""
    first = start % len(LOADS)
    there = (*LOADS[first:], *LOADS[:first])
    return (*there, *reversed(there)) * rounds


def measured(
    start: int, answer: Answer, gateways: Mapping[Load, Gateway], receiver: Receiver, options: argparse.Namespace
) -> list[Row]:
    """A row for each load. Raises RuntimeError if spans did not come while they were measured."""
    for load in (OFF, TENTH):
        turn(gateways[load], answer, load.every, options.connections, _WARMS_UP_S)
    before = receiver.batches
    done, took_s = dict.fromkeys(LOADS, 0), dict.fromkeys(LOADS, 0.0)
    for load in in_turns(start, options.rounds):
        requests, cpu = turn(gateways[load], answer, load.every, options.connections, options.seconds)
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


def ratio(rows: Sequence[Row], load: Load, beside: Load) -> Ratio:
    """The CPU of a load divided by that of another in the same start."""
    of = {(row.start, row.load): row.cpu_us for row in rows}
    ratios = [of[start, load.name] / of[start, beside.name] for start in {row.start for row in rows}]
    return Ratio(mean(ratios), stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0)


def _table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "CPU of a gateway for each request",
        ("answer", "traces"),
        ("us", f"beside {OFF.name}", f"beside {NONE.name}"),
        caption=f"goal with 1 in 100: at most {GOAL} times that of a gateway without traces",
    )
    for answer in dict.fromkeys(row.answer for row in rows):
        of_answer = [row for row in rows if row.answer == answer]
        for load in LOADS:
            cpu_us = mean(row.cpu_us for row in of_answer if row.load == load.name)
            off = "" if load is OFF else str(ratio(of_answer, load, OFF))
            none = str(ratio(of_answer, load, NONE)) if load.every else ""
            drawn.add_row(answer if load is OFF else "", load.name, f"{cpu_us:.0f}", off, none)
    return drawn


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=count, default=36, help="of the gateways (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=3, help="all loads there and back (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=0.5, help="of each turn (default: %(default)s)")
    parser.add_argument("--connections", type=count, default=8, help="closed-loop clients (default: %(default)s)")
    parser.add_argument("--answers", type=names(ANSWERS), default="plain", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    found = record.Found[Row]({}, options.out, Console())
    run(options, found)
    found.console.print(_table(found.rows))
    found.save()


if __name__ == "__main__":
    main()
