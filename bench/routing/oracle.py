"""A router that knows everything: each cache's blocks and each queue, as they are when a request is placed."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from bench.load import Body, Spread
from bench.routing.whatif import Weights
from bench.workloads import Session

_WEIGHT = Weights().charged


class Oracle:
    """Asks every simulated replica what the prompt would meet there, and takes the one where least is to be computed
    before its first token; what the prompt itself lacks counts more, as it delays others too (ADR 2)."""

    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str], seed: int) -> None:
        self._http = http
        self._urls = urls
        self._rng = random.Random(seed)
        self._turn = asyncio.Lock()
        self._sent = dict.fromkeys(urls, 0)
        self._recent: dict[str, deque[int]] = {url: deque(maxlen=64) for url in urls}
        """What the last prompts sent there lacked."""

    async def place(self, _session: Session, body: Body) -> str:
        """One request at a time: the next one sees this one in its queue, or counts it as on its way there."""
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
        return outlook["backlog_tokens"] + coming_tokens + _WEIGHT * lacks, active


@asynccontextmanager
async def oracle(urls: Sequence[str], seed: int) -> AsyncIterator[Spread]:
    """The oracle as a spread over these replicas, to whom nobody else may send anything."""
    async with aiohttp.ClientSession() as http:
        yield Oracle(http, urls, seed).place
