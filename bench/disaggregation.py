"""What pairs of prefill and decode gain, and what they cost.

    python -m bench.disaggregation [--gateways 1,4,8] [--prefills 2] [--rates 2,4,6] [--seconds 60] [--out FILE]

Eight simulated replicas get streams with long prompts at random times. Each cluster runs once with replicas that all
compute prompts and decode, and once with some that only compute prompts (`--prefills` of the eight). The times are
what clients see: from the sending of a request to its first token, and from each token to the next one. A replica
decodes no token while it computes up to 8192 tokens of prompts, as vLLM with `--max-num-batched-tokens 8192`. KV is
moved at 50 Gbit/s.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from rich.console import Console

from bench import record, tables
from bench.cluster import running_gateways, running_replicas
from bench.load import MODEL, at_random_times, percentile
from bench.options import counts, positive

REPLICAS = 8
ARGUMENTS = ("--nixl", "--prefill-tokens-per-s", "10000", "--decode-s-per-token", "0.02", "--num-gpu-blocks", "32768")
PROMPT_WORDS = (500, 4000)
"""A word has about two tokens."""
ANSWER_TOKENS = 100
CALM_S = 10.0
"""Before anything is measured."""


@dataclass
class Row:
    """One run."""

    gateways: int
    prefills: int
    """Replicas that only compute prompts. 0: all replicas do everything."""
    rate_per_s: float
    streams: int = 0
    failed: int = 0
    ttft_ms: tuple[float, float] = (0.0, 0.0)
    """p50 and p99; so is the next one."""
    token_ms: tuple[float, float] = (0.0, 0.0)
    worst_token_ms: float = 0.0
    """p50 of the longest time between two tokens of a stream."""


@dataclass
class Load:
    """Clients that come at random times, whether others have been answered or not."""

    urls: Sequence[str]
    http: httpx.AsyncClient
    rate_per_s: float
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    longest_s: list[float] = field(default_factory=list)
    failed: int = 0

    async def run(self, seconds: float) -> None:
        await at_random_times(self._ask, self.rate_per_s, seconds, self.dice)

    async def _ask(self, number: int) -> None:
        text = " ".join(f"w{self.dice.randrange(10**5)}" for _ in range(self.dice.randint(*PROMPT_WORDS)))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
        }
        url, times, last = f"{self.urls[number % len(self.urls)]}/v1/chat/completions", [time.monotonic()], b""
        async with self.http.stream("POST", url, json=body) as answer:
            async for piece in answer.aiter_bytes():
                last = (last + piece)[-64:]
                if b'"content":"' in piece and b'"content":""' not in piece:
                    times.append(time.monotonic())
        if answer.status_code != 200 or not last.endswith(b"data: [DONE]\n\n") or len(times) < ANSWER_TOKENS // 2:
            self.failed += 1
            return
        self.first_s.append(times[1] - times[0])
        between_s = [after - before for before, after in pairwise(times[1:])]
        self.between_s += between_s
        self.longest_s.append(max(between_s))


@contextmanager
def running(gateways: int, prefills: int) -> Iterator[list[str]]:
    """The URLs of gateways before eight replicas."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-")))
        sims = stack.enter_context(running_replicas(folder, REPLICAS, ARGUMENTS))
        roles = [*["prefill"] * prefills, *["decode"] * (REPLICAS - prefills)] if prefills else ["both"] * REPLICAS
        cluster = stack.enter_context(
            running_gateways(
                {sim.id: sim.url for sim in sims},
                gateways=gateways,
                config={"hedge": {"max_share": 0}},
                beside={sim.id: f"role={role}" for sim, role in zip(sims, roles, strict=True)},
            )
        )
        yield cluster.gateway_urls


async def measured(urls: Sequence[str], row: Row, seconds: float) -> None:
    """Fills in the row."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        await Load(urls, http, row.rate_per_s).run(CALM_S)
        load = Load(urls, http, row.rate_per_s, random.Random(2))
        await load.run(seconds)
    row.streams, row.failed = len(load.first_s), load.failed
    row.ttft_ms, row.token_ms = _ms(load.first_s), _ms(load.between_s)
    row.worst_token_ms = round(1000 * percentile(load.longest_s, 0.5), 1)


def _ms(times_s: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    p50_ms, p99_ms = (round(1000 * percentile(times_s, share), 1) for share in (0.5, 0.99))
    return p50_ms, p99_ms


def cells(row: Row) -> Sequence[str]:
    return (
        str(row.gateways),
        f"{row.prefills} + {REPLICAS - row.prefills}" if row.prefills else f"{REPLICAS} of both",
        f"{row.rate_per_s:g}",
        str(row.streams),
        str(row.failed),
        *(f"{each:.0f}" for each in (*row.ttft_ms, *row.token_ms, row.worst_token_ms)),
    )


WORDS = ("gateways", "prefill + decode")
FIGURES = (
    *("streams/s", "streams", "failed", "first token p50 ms", "p99 ms", "next token p50 ms", "p99 ms"),
    "longest of a stream, p50 ms",
)


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=counts, default=[1, 4, 8])
    parser.add_argument("--prefills", type=counts, default=[2], help="replicas of the eight that compute prompts")
    parser.add_argument("--rates", type=counts, default=[2, 4, 6], help="streams per second, of all gateways")
    parser.add_argument("--seconds", type=positive, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, console = list[Row](), Console()
    for gateways in options.gateways:
        for rate in options.rates:
            for prefills in (0, *options.prefills):
                row = Row(gateways, prefills, rate)
                rows.append(row)
                with running(gateways, prefills) as urls:
                    asyncio.run(measured(urls, row, options.seconds))
                console.print(*cells(row), sep=" | ")
    shown = tables.table("Streams with long prompts, with and without pairs", WORDS, FIGURES)
    for row in rows:
        shown.add_row(*cells(row))
    console.print(shown)
    record.write(options.out, [asdict(row) for row in rows], {})


if __name__ == "__main__":
    main()
