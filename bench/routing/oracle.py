"""A router that knows everything: each cache's blocks and each queue at the time when a request is placed."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from bench.load import Body, Spread
from bench.workloads import Session

_CHARGED_WEIGHT = 3  # as in coordinator/lua/lib/costs.lua


class Oracle:
    """Asks every simulated replica for its cached tokens and its backlog, and chooses the one that must compute least
    before the first token. The prompt's own missing tokens count more, because they delay other requests as well (ADR
    2)."""

    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str], seed: int) -> None:
        self._http = http
        self._urls = urls
        self._rng = random.Random(seed)
        self._turn = asyncio.Lock()
        self._sent = dict.fromkeys(urls, 0)
        self._recent: dict[str, deque[int]] = {url: deque(maxlen=64) for url in urls}
        """The missing tokens of the last prompts that were sent to each replica."""

    async def place(self, _session: Session, body: Body) -> str:
        """Places one request at a time. The next placement sees this request in the replica's queue, or counts it as on
        its way."""
        async with self._turn:
            outlooks = await asyncio.gather(*(self._outlook(url, body) for url in self._urls))
            costs = [self._cost(url, outlook) for url, outlook in zip(self._urls, outlooks, strict=True)]
            best = min(range(len(costs)), key=lambda at: (costs[at], self._rng.random()))
            url, outlook = self._urls[best], outlooks[best]
            self._sent[url] += 1
            self._recent[url].append(outlook["prompt_tokens"] - outlook["cached_tokens"])
            return url

    async def _outlook(self, url: str, body: Body) -> dict[str, Any]:
        async with self._http.post(f"{url}/sim/outlook", json=body) as response:
            outlook: dict[str, Any] = await response.json()
            return outlook

    def _cost(self, url: str, outlook: dict[str, Any]) -> tuple[float, int]:
        recent = self._recent[url]
        on_their_way = min(len(recent), max(0, self._sent[url] - outlook["requests"]))
        coming_tokens = sum(list(recent)[len(recent) - on_their_way :])
        lacks = outlook["prompt_tokens"] - outlook["cached_tokens"]
        active = outlook["running"] + outlook["waiting"] + on_their_way
        return outlook["backlog_tokens"] + coming_tokens + _CHARGED_WEIGHT * lacks, active


@asynccontextmanager
async def oracle(urls: Sequence[str], seed: int) -> AsyncIterator[Spread]:
    """The oracle as a spread over these replicas. No other client may send requests to them."""
    async with aiohttp.ClientSession() as http:
        yield Oracle(http, urls, seed).place
