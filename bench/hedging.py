"""What second attempts of late streams gain, and what they cost.

    python -m bench.hedging [--gateways 1,4,8] [--seconds 45] [--rate 10] [--out FILE]

Eight simulated replicas get streams at random times. After a calm time, one of them becomes five times slower, and from
then on all first bytes are measured. Each cluster runs once with hedges and once without. In other runs, no replica
becomes slower. The extra tokens are those that second replicas had to compute, of all tokens that had to be computed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from bench import record, tables
from bench.cluster import Cluster, running_cluster
from bench.load import MODEL, at_random_times, percentile
from bench.options import counts, positive

REPLICAS = 8
TIMES_SLOWER = 5
ARGUMENTS = ("--prefill-tokens-per-s", "10000", "--decode-s-per-token", "0.01")
DOCUMENTS, DOCUMENT_WORDS, QUESTION_WORDS, ANSWER_TOKENS = 8, 1000, 1500, 16
CALM_S = 30.0
_HEDGES = re.compile(r'^kvgate_hedges_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
_TOKENS = re.compile(r"^kvgate_hedged_tokens_total (\S+)$", re.MULTILINE)


@dataclass
class Row:
    """One run. Times are those from the sending of a request to its first event."""

    gateways: int
    has_slower: bool
    has_hedges: bool
    requests: int = 0
    failed: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    won: int = 0
    hedged: int = 0
    """Second attempts that were sent, or won."""
    computed_tokens: int = 0
    """That the answers' prompts needed, by their usage."""
    hedged_tokens: int = 0


class Load:
    """Clients that come at random times, whether others have been answered or not."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, rate_per_s: float) -> None:
        self._urls, self._http, self._rate_per_s = cluster.gateway_urls, http, rate_per_s
        self._random = random.Random(1)
        self._documents = [self._words(DOCUMENT_WORDS) for _ in range(DOCUMENTS)]
        self.first_s: list[float] = []
        self.failed = self.computed_tokens = 0

    def _words(self, count: int) -> str:
        return " ".join(f"w{self._random.randrange(10**5)}" for _ in range(count))

    async def run(self, seconds: float) -> None:
        await at_random_times(self._ask, self._rate_per_s, seconds, self._random)

    async def _ask(self, number: int) -> None:
        text = self._random.choice(self._documents) + self._words(QUESTION_WORDS)
        options = {"max_tokens": ANSWER_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **options}
        began_s, last = time.monotonic(), b""
        url = f"{self._urls[number % len(self._urls)]}/v1/chat/completions"
        async with self._http.stream("POST", url, json=body) as answer:
            async for piece in answer.aiter_bytes():
                if not last:
                    first_s = time.monotonic() - began_s
                last = (last + piece)[-4096:]
        if answer.status_code != 200 or not last.endswith(b"data: [DONE]\n\n"):
            self.failed += 1
            return
        self.first_s.append(first_s)
        usage = next(each for line in reversed(last.split(b"\n\n")) if (each := _usage(line)))
        self.computed_tokens += usage["prompt_tokens"] - (usage.get("prompt_tokens_details") or {}).get(
            "cached_tokens", 0
        )


def _usage(event: bytes) -> dict[str, Any]:
    data = event.removeprefix(b"data: ")
    return (orjson.loads(data).get("usage") or {}) if data.startswith(b"{") else {}


async def _hedges(cluster: Cluster, http: httpx.AsyncClient) -> dict[str, int]:
    """The counts of all gateways."""
    sums = dict.fromkeys(("won", "lost", "failed", "tokens"), 0)
    for url in cluster.gateway_urls:
        text = (await http.get(f"{url}/metrics")).text
        for outcome, value in [*_HEDGES.findall(text), *(("tokens", each) for each in _TOKENS.findall(text))]:
            sums[outcome] = sums.get(outcome, 0) + round(float(value))
    return sums


async def measured(cluster: Cluster, row: Row, seconds: float, rate_per_s: float) -> Row:
    """Fills in the row."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        load = Load(cluster, http, rate_per_s)
        await load.run(CALM_S)
        before = await _hedges(cluster, http)
        load.first_s.clear()
        load.computed_tokens = 0
        if row.has_slower:
            cluster.replicas[0].fail("slower", times=TIMES_SLOWER)
        await load.run(seconds)
        hedges = {
            name: count - before[name] for name, count in (await _hedges(cluster, http)).items() if name in before
        }
    row.requests, row.failed, row.computed_tokens = len(load.first_s), load.failed, load.computed_tokens
    row.p50_ms, row.p99_ms = (round(1000 * percentile(load.first_s, share), 1) for share in (0.5, 0.99))
    row.won, row.hedged = hedges["won"], hedges["won"] + hedges["lost"] + hedges["failed"]
    row.hedged_tokens = hedges["tokens"]
    return row


def cells(row: Row) -> Sequence[str]:
    share = row.hedged_tokens / max(1, row.computed_tokens)
    return (
        str(row.gateways),
        f"{TIMES_SLOWER} x slower" if row.has_slower else "-",
        "yes" if row.has_hedges else "no",
        str(row.requests),
        str(row.failed),
        f"{row.p50_ms:.0f}",
        f"{row.p99_ms:.0f}",
        f"{row.won} of {row.hedged}, {100 * row.hedged / max(1, row.requests):.2f} %",
        f"{100 * share:.2f} %",
    )


WORDS = ("gateways", "one replica", "hedges")
FIGURES = ("streams", "failed", "p50 ms", "p99 ms", "won of hedged", "more tokens")


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=counts, default=[1, 4, 8])
    parser.add_argument("--seconds", type=positive, default=45.0)
    parser.add_argument("--rate", type=positive, default=10.0, help="streams per second, of all gateways")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, console = list[Row](), Console()
    for gateways in options.gateways:
        for has_slower in (True, False):
            for has_hedges in (False, True):
                config = {} if has_hedges else {"hedge": {"max_share": 0}}
                with running_cluster(
                    gateways=gateways, replicas=REPLICAS, replica_arguments=ARGUMENTS, config=config
                ) as cluster:
                    row = Row(gateways, has_slower, has_hedges)
                    rows.append(asyncio.run(measured(cluster, row, options.seconds, options.rate)))
                console.print(*cells(rows[-1]), sep=" | ")
    shown = tables.table("First bytes while one of eight replicas is slow", WORDS, FIGURES)
    for row in rows:
        shown.add_row(*cells(row))
    console.print(shown)
    record.write(options.out, [asdict(row) for row in rows], {})


if __name__ == "__main__":
    main()
