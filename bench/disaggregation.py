"""What pairs of prefill and decode gain, and what they cost.

    python -m bench.disaggregation [--gateways 1,4,8] [--prefills 2] [--rates 2,4,6] [--seconds 60] [--out FILE]
    python -m bench.disaggregation --systems kvgate,vllm-router,smg,toy-proxy --proxy FILE [--speed 0.5]

Eight simulated replicas get streams with long prompts at random times. Each cluster runs once with replicas that all
compute prompts and decode, and once with some that only compute prompts (`--prefills` of the eight). The times are
what clients see: from the sending of a request to its first token, and from each token to the next one. A replica
decodes no token while it computes up to 8192 tokens of prompts, as vLLM with `--max-num-batched-tokens 8192`. KV is
moved at 50 Gbit/s.

Other routers (bench/pair_routers.py) run with pairs only, as many side by side as there are gateways. Clients take
turns between them. `--speed 0.5` makes all times of replicas and clients twice as long, for a busy machine; the output
converts them back. The client's timer tells whether the machine kept up: `late` is the p99 of how late it rang,
converted like all times. A run with more than 15 ms is disturbed, and `--attempts` repeats it. The last one counts.
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
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench import pair_routers, record, tables
from bench.cluster import running_gateways, running_replicas, told_roles
from bench.load import MODEL, at_random_times, percentile
from bench.machine import IdleShare
from bench.options import count, counts, names, positive
from bench.peers import DoesNotStart, running_peer

REPLICAS = 8
ARGUMENTS = ("--nixl", "--prefill-tokens-per-s", "10000", "--decode-s-per-token", "0.02", "--num-gpu-blocks", "32768")
PROMPT_WORDS = (500, 4000)
"""A word has about two tokens."""
ANSWER_TOKENS = 100
CALM_S = 5.0
"""Before anything is measured."""
TICK_S = 0.05
"""Of the timer that tells whether the machine keeps up."""
LATE_MS = 15.0
"""If the timer rings later, the machine has disturbed the run."""
KVGATE = "kvgate"
CONFIG = {
    "hedge": {"max_share": 0},
    # All share the processors, so whoever answers may have to wait for one.
    "redis": {"budget_ms": 200},
    "health": {"hang_s": 300, "timeout_s": 5},
}


@dataclass
class Row:
    """One run."""

    system: str
    gateways: int
    """Or routers."""
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
    speed: float = 1.0
    """All times were divided by it, and are converted back here."""
    late_ms: float = 0.0
    """p99 of how late the client's timer rang."""
    idle: float = 0.0
    """The idle share of the machine."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        return f"{self.system} {self.gateways}"

    @property
    def replicas(self) -> str:
        return f"{self.prefills} + {REPLICAS - self.prefills}" if self.prefills else f"{REPLICAS} of both"


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
    late_s: list[float] = field(default_factory=list)
    failed: int = 0

    async def run(self, seconds: float) -> None:
        timer = asyncio.ensure_future(self._watch())
        await at_random_times(self._ask, self.rate_per_s, seconds, self.dice)
        timer.cancel()

    async def _watch(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_s.append(time.monotonic() - due_s)

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
def running(row: Row, proxy: Path | None) -> Iterator[list[str]]:
    """The URLs of gateways, or of other routers, before eight replicas. Raises DoesNotStart."""
    prefills = row.prefills
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-")))
        sims = stack.enter_context(running_replicas(folder, REPLICAS, (*ARGUMENTS, "--speed", str(row.speed))))
        if row.system != KVGATE:
            router, urls = pair_routers.pair_router(row.system, prefills, proxy), [sim.url for sim in sims]
            yield [stack.enter_context(running_peer(router, urls, MODEL))[0] for _ in range(row.gateways)]
            return
        cluster = stack.enter_context(
            running_gateways(
                {sim.id: sim.url for sim in sims},
                gateways=row.gateways,
                config=CONFIG,
                beside=told_roles(sims, prefills),
            )
        )
        yield cluster.gateway_urls


async def measured(urls: Sequence[str], row: Row, seconds: float) -> None:
    """Fills in the row."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        rate_per_s = row.rate_per_s * row.speed
        await Load(urls, http, rate_per_s).run(CALM_S / row.speed)
        load, idle = Load(urls, http, rate_per_s, random.Random(2)), IdleShare()
        await load.run(seconds / row.speed)
    row.streams, row.failed, row.idle = len(load.first_s), load.failed, round(idle(), 3)

    def ms(times_s: Sequence[float], share: float) -> float:
        return round(1000 * row.speed * percentile(times_s, share), 1)

    row.ttft_ms = ms(load.first_s, 0.5), ms(load.first_s, 0.99)
    row.token_ms = ms(load.between_s, 0.5), ms(load.between_s, 0.99)
    row.worst_token_ms, row.late_ms = ms(load.longest_s, 0.5), ms(load.late_s, 0.99)


def cells(row: Row) -> Sequence[str]:
    return (
        row.name,
        row.replicas,
        f"{row.rate_per_s:g}",
        str(row.streams),
        str(row.failed),
        *(f"{each:.0f}" for each in (*row.ttft_ms, *row.token_ms, row.worst_token_ms, row.late_ms)),
        f"{row.idle:.0%}",
    )


WORDS = ("system", "prefill + decode")
FIGURES = (
    *("streams/s", "streams", "failed", "first token p50 ms", "p99 ms", "next token p50 ms", "p99 ms"),
    *("longest of a stream, p50 ms", "late p99 ms", "idle"),
)


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """One run after the other."""
    for gateways in options.gateways:
        for rate in options.rates:
            for system in options.systems:
                for prefills in (*([0] if system == KVGATE else []), *options.prefills):
                    yield Row(system, gateways, prefills, rate, speed=options.speed)


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=counts, default=[1, 4, 8])
    parser.add_argument("--prefills", type=counts, default=[2], help="replicas of the eight that compute prompts")
    parser.add_argument("--rates", type=counts, default=[2, 4, 6], help="streams per second, of all gateways")
    parser.add_argument("--seconds", type=positive, default=60.0)
    parser.add_argument("--systems", type=names((KVGATE, *pair_routers.NAMES)), default=[KVGATE])
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py")
    parser.add_argument("--speed", type=positive, default=1.0, help="divides the times of replicas and clients")
    parser.add_argument("--attempts", type=count, default=1, help="runs of a cell, until none disturbs it")
    parser.add_argument("--install", action="store_true", help="install the other routers, and end")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.install:
        pair_routers.install()
        return
    found = record.Found[Row](pair_routers.versions() | {KVGATE: metadata.version("kvgate")}, options.out, Console())
    for row in rows_of(options):
        what = f"{row.name}, {row.replicas}"
        if why := row.system != KVGATE and pair_routers.missing(row.system, options.proxy):
            found.leave_out(f"{what}: {why}")
            continue
        try:
            for _ in range(options.attempts):
                with running(row, options.proxy) as urls:
                    asyncio.run(measured(urls, row, options.seconds))
                found.console.print(*cells(row), sep=" | ")
                if row.late_ms <= LATE_MS:
                    break
        except DoesNotStart as error:
            found.leave_out(f"{what}: {error}")
            continue
        found.rows.append(row)
        found.save()
    shown = tables.table("Streams with long prompts, with and without pairs", WORDS, FIGURES)
    for row in found.rows:
        shown.add_row(*cells(row))
    found.console.print(shown)


if __name__ == "__main__":
    main()
