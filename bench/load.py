"""A closed-loop client: so many requests at once, each streamed, the next one sent when one is done."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from bench.workloads import Request

BLOCK_TOKENS = 16
"""Of the simulated engines; vLLM's default."""


@dataclass
class Result:
    """What a run measured. Token counts are the engines' own (usage)."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    by_replica: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    predicted: int = 0
    """Answers whose gateway said what it predicted."""
    over: int = 0
    """Of these, the answers of which less was cached than the matched key less a block."""
    under: int = 0
    """Of these, the answers of which more was cached than the chain's next key and a block."""

    @property
    def cache_share(self) -> float:
        """The share of prompt tokens that the engines served from cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def percentile_ttft_s(self, share: float) -> float:
        ranked = sorted(self.ttft_s)
        return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else 0.0


Spread = Callable[[Request], str]


def random_spread(urls: Sequence[str], seed: int) -> Spread:
    """A load balancer that knows nothing: each request to any of the urls."""
    rng = random.Random(seed)
    return lambda _request: rng.choice(urls)


def pinned_spread(urls: Sequence[str]) -> Spread:
    """Perfect pinning: every group has its url, the groups dealt out evenly."""
    return lambda request: urls[request.group % len(urls)]


async def run(requests: Sequence[Request], spread: Spread, concurrency: int) -> Result:
    """Send them all; a request that fails is counted, never repeated."""
    result = Result()
    queue = iter(requests)
    started = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(_worker(session, queue, spread, result) for _ in range(concurrency)))
    result.wall_s = time.perf_counter() - started
    return result


async def _worker(session: aiohttp.ClientSession, queue: Iterator[Request], spread: Spread, result: Result) -> None:
    for request in queue:
        try:
            await _send(session, request, spread(request), result)
        except (aiohttp.ClientError, OSError):
            result.failed += 1


async def _send(session: aiohttp.ClientSession, request: Request, url: str, result: Result) -> None:
    body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        text = await response.content.readany()
        ttft_s = time.perf_counter() - started
        text += await response.read()
        if response.status != 200 or b"data: [DONE]" not in text:
            result.failed += 1
            return
        headers = response.headers
    usage = _usage(text)
    replica = headers.get("x-kvgate-replica", url)
    result.requests += 1
    result.ttft_s.append(ttft_s)
    result.by_replica[replica] = result.by_replica.get(replica, 0) + 1
    result.prompt_tokens += usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    cached_tokens = details.get("cached_tokens") or 0
    result.cached_tokens += cached_tokens
    if "x-kvgate-next-boundary-tokens" in headers:
        result.predicted += 1
        result.over += cached_tokens < int(headers["x-kvgate-matched-tokens"]) - BLOCK_TOKENS
        result.under += cached_tokens > int(headers["x-kvgate-next-boundary-tokens"]) + BLOCK_TOKENS


def _usage(text: bytes) -> dict[str, Any]:
    for line in reversed(text.split(b"\n\n")):
        if b'"usage"' in line and (usage := orjson.loads(line.removeprefix(b"data: ")).get("usage")):
            found: dict[str, Any] = usage
            return found
    return {"prompt_tokens": 0}
