"""A closed-loop client: a fixed number of streamed requests at once. When one ends, the next is sent."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from bench.workloads import Message, Session

BLOCK_TOKENS = 16
"""The block size of the simulated engines. It is vLLM's default."""
MODEL = "sim"
TIMEOUT_S = 120
"""Timeout of a request. It is longer than any answered request takes."""

Body = dict[str, Any]
Spread = Callable[[Session, Body], Awaitable[str]]
"""Returns the URL for a session's next request."""


@dataclass
class Result:
    """The results of a run. Token counts are the engines' own (usage)."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """The mean time between two tokens of each answer, in the order of `ttft_s`."""
    longest_s: list[float] = field(default_factory=list)
    """The longest time without a token of each answer."""
    by_replica: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    predicted: int = 0
    """Answers whose gateway gave its prediction."""
    over: int = 0
    """Of these, answers with fewer cached tokens than the matched key minus a block."""
    under: int = 0
    """Of these, answers with more cached tokens than the chain's next key plus a block."""

    @property
    def cache_share(self) -> float:
        """The share of prompt tokens that the engines served from cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def percentile_ttft_s(self, share: float) -> float:
        return percentile(self.ttft_s, share)


async def at_random_times(
    ask: Callable[[int], Awaitable[None]], rate_per_s: float, seconds: float, dice: random.Random
) -> None:
    """Clients that come whether others have been answered or not. Asks for so long, each time with the next number from
    0, and waits for the answers."""
    until_s, tasks = time.monotonic() + seconds, list[asyncio.Future[None]]()
    while time.monotonic() < until_s:
        tasks.append(asyncio.ensure_future(ask(len(tasks))))
        await asyncio.sleep(dice.expovariate(rate_per_s))
    await asyncio.gather(*tasks)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies. 0 if there are no values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else 0.0


def random_spread(urls: Sequence[str], seed: int) -> Spread:
    """A load balancer that knows nothing: it sends each request to any of the URLs."""
    rng = random.Random(seed)

    async def spread(_session: Session, _body: Body) -> str:
        return rng.choice(urls)

    return spread


def pinned_spread(urls: Sequence[str], sessions: Sequence[Session] = ()) -> Spread:
    """Perfect pinning: every group has its own URL. Groups are assigned so that each URL gets an equal part of
    `sessions`."""
    turns: dict[int, int] = {}
    for session in sessions:
        turns[session.group] = turns.get(session.group, 0) + len(session.turns)
    load = dict.fromkeys(urls, 0)
    url_of: dict[int, str] = {}
    for group, count in sorted(turns.items(), key=lambda pair: -pair[1]):
        url_of[group] = min(urls, key=lambda url: load[url])
        load[url_of[group]] += count

    async def spread(session: Session, _body: Body) -> str:
        return url_of.get(session.group, urls[session.group % len(urls)])

    return spread


class Turns:
    """Chooses the session whose turn is next. Sessions take turns in the given order, each only after its last
    answer."""

    def __init__(self, sessions: Sequence[Session], order: Sequence[int]) -> None:
        self._left = len(order)
        self._places: list[deque[int]] = [deque() for _ in sessions]
        """The places of each session's coming turns in the order."""
        for place, index in enumerate(order):
            self._places[index].append(place)
        self._idle = [(places[0], index) for index, places in enumerate(self._places) if places]
        """Idle sessions with turns left, by the place of their next turn. A heap."""
        heapify(self._idle)
        self._freed = asyncio.Condition()
        self._said: list[list[Message]] = [[] for _ in sessions]
        self._sessions = sessions
        self._turn = [0] * len(sessions)

    async def begin(self) -> tuple[int, list[Message]] | None:
        """An idle session and all its messages up to its next turn. None if no session has turns left."""
        async with self._freed:
            while self._left:
                if self._idle:
                    _, index = heappop(self._idle)
                    self._places[index].popleft()
                    self._left -= 1
                    self._said[index] += self._sessions[index].turns[self._turn[index]]
                    self._turn[index] += 1
                    return index, list(self._said[index])
                await self._freed.wait()
        return None

    def give_up(self) -> int:
        """Drops all remaining turns. Returns their number."""
        left, self._left = self._left, 0
        return left

    async def end(self, index: int, answer: str) -> None:
        self._said[index].append({"role": "assistant", "content": answer})
        async with self._freed:
            if places := self._places[index]:
                heappush(self._idle, (places[0], index))
            if self._left:
                self._freed.notify()
            else:
                self._freed.notify_all()


async def run(
    sessions: Sequence[Session],
    spread: Spread,
    concurrency: int,
    order: Sequence[int] | None = None,
    model: str = MODEL,
    block_tokens: int = BLOCK_TOKENS,
) -> Result:
    """Sends all requests. A failed request is counted and never repeated.

    If every client has failed twice since the last answer to any client, the server counts as gone, and all remaining
    requests count as failed. `order` names a session for each of its turns; without it, all turns of the first session
    come first.
    """
    if order is None:
        order = [index for index, session in enumerate(sessions) for _ in session.turns]
    result, turns = Result(), Turns(sessions, order)
    started = time.perf_counter()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
    ) as http:
        failed_since = [0] * concurrency
        """Failures of each client since the last answer to any client."""

        async def worker(client: int) -> None:
            while (turn := await turns.begin()) is not None:
                index, messages = turn
                session = sessions[index]
                body = {"model": model, "max_tokens": session.max_tokens, "messages": messages}
                answer = ""
                started = time.perf_counter()
                try:
                    url = await spread(session, body)
                    answer = await send(http, body, url, started, result, block_tokens)
                    failed_since[:] = [0] * concurrency
                except (aiohttp.ClientError, OSError, TimeoutError, NotAnAnswer):
                    result.failed += 1
                    failed_since[client] += 1
                    if min(failed_since) >= 2:
                        result.failed += turns.give_up()
                await turns.end(index, answer)

        await asyncio.gather(*(worker(client) for client in range(concurrency)))
    result.wall_s = time.perf_counter() - started
    return result


class NotAnAnswer(Exception):
    """The reply is not a complete answer to a chat request."""


async def send(
    http: aiohttp.ClientSession, body: Body, url: str, started: float, result: Result, block_tokens: int
) -> str:
    """Returns the answer's text. Raises NotAnAnswer and aiohttp's errors."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        pieces = [await response.content.readany()]
        arrived_s = [time.perf_counter()]
        async for piece in response.content.iter_any():
            pieces.append(piece)
            arrived_s.append(time.perf_counter())
        text = b"".join(pieces)
        if response.status != 200 or b"data: [DONE]" not in text:
            raise NotAnAnswer
        headers = response.headers
    answer, usage = _read(text)
    replica = headers.get("x-kvgate-replica", url)
    result.requests += 1
    result.ttft_s.append(arrived_s[0] - started)
    result.token_s.append((arrived_s[-1] - arrived_s[0]) / max(1, (usage.get("completion_tokens") or 0) - 1))
    result.longest_s.append(max((after - before for before, after in pairwise(arrived_s)), default=0.0))
    result.by_replica[replica] = result.by_replica.get(replica, 0) + 1
    result.prompt_tokens += usage["prompt_tokens"]
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    result.cached_tokens += cached_tokens
    if "x-kvgate-next-boundary-tokens" in headers:
        result.predicted += 1
        result.over += cached_tokens < int(headers["x-kvgate-matched-tokens"]) - block_tokens
        result.under += cached_tokens > int(headers["x-kvgate-next-boundary-tokens"]) + block_tokens
    return answer


def _read(text: bytes) -> tuple[str, dict[str, Any]]:
    """The text and the usage in a stream. Raises NotAnAnswer for an error and for anything that is not an answer."""
    said: list[str] = []
    usage: dict[str, Any] = {}
    try:
        for found in re.findall(rb"^data: ?(\{.*)$", text, re.MULTILINE):
            event = orjson.loads(found)
            if event.get("error"):
                raise NotAnAnswer
            usage = event.get("usage") or usage
            said += [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAnAnswer from error
    if not said or not usage.get("prompt_tokens"):
        raise NotAnAnswer
    return "".join(said), usage
