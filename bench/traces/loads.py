"""The loads that are compared, and who takes the spans."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from math import sqrt
from statistics import mean, stdev
from threading import Condition

from bench.overhead.client import Payload
from bench.overhead.shapes import Answer, payload
from bench.threaded_server import SilentHandler
from gateway.tracing.otel_variables import NO_VARIABLES

GOAL = 1.02
"""With one request in a hundred traced."""
BATCH = NO_VARIABLES.batch // 4
"""So many traces leave together: fewer than by default, so that a turn can be short and has a whole batch."""
ENVIRONMENT = ("OTEL_BSP_SCHEDULE_DELAY=100000000", f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE={BATCH}")
"""A gateway's: spans leave when a batch is whole, and never because time is over."""
_PROMPT = "350 B"
_COMES_WITHIN_S = 10.0


class _Taker(SilentHandler):
    """Takes spans, and forgets them."""

    server: Receiver

    def do_POST(self) -> None:  # noqa: N802 (the name that http.server calls)
        self.rfile.read(int(self.headers["content-length"]))
        with self.server.changed:
            self.server.batches += 1
            self.server.changed.notify_all()
        self.send_response(200)
        self.end_headers()


class Receiver(ThreadingHTTPServer):
    """Counts the batches of spans that come."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.batches = 0
        self.changed = Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def wait_for(self, batches: int) -> None:
        """Until so many have come. Raises RuntimeError if they do not."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.batches >= batches, _COMES_WITHIN_S):
                raise RuntimeError(f"{self.batches} batches of spans came, not {batches}")


class Requests(Payload):
    """The first of each `every` requests asks to be traced; 0: none does."""

    def __init__(self, requests: Payload, every: int) -> None:
        self._requests = requests
        self._every = every
        self.sent = 0

    def next(self) -> bytes:
        request = self._requests.next()
        self.sent += 1
        if not self._every or self.sent % self._every != 1:
            return request
        parent = f"traceparent: 00-{random.randbytes(16).hex()}-{random.randbytes(8).hex()}-01"
        return request.replace(b"\r\n", f"\r\n{parent}\r\n".encode(), 1)


@dataclass(frozen=True)
class Load:
    """What is compared."""

    name: str
    every: int = 0
    """One request in so many is traced; 0: none."""

    def requests(self, answer: Answer) -> Requests:
        """Requests that get this answer."""
        return Requests(payload(_PROMPT, answer), self.every)


OFF = Load("off")
NONE = Load("none")
HUNDREDTH = Load("1 in 100", every=100)
TENTH = Load("1 in 10", every=10)
REQUESTS = HUNDREDTH.every * BATCH
"""Of a turn, at least: with one in a hundred traced, a batch leaves."""


@dataclass(frozen=True)
class Ratio:
    """How many times the cost of another load, as a mean over starts, and its standard error; 0 of one start."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}" if self.error else f"{self.mean:.3f}"


def ratio(costs: Mapping[tuple[int, str], float], load: Load, beside: Load) -> Ratio:
    """The cost of a load divided by that of another in the same start. `costs` are by start and load's name."""
    ratios = [costs[start, load.name] / costs[start, beside.name] for start in {start for start, _ in costs}]
    return Ratio(mean(ratios), stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0)
