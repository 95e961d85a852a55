"""Clients that send requests at a steady rate, whatever happened to earlier requests. Half of them are streamed.
So that requests wait, a fixed number of clients send their next request when the last one has ended.

Prompts share long beginnings, so that the choice of the replica matters. Each request has its own connection.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from bench.faults.balancer import Balancer
from bench.faults.verdicts import End, Seen
from bench.load import BLOCK_TOKENS
from bench.workloads import text
from gateway.tasks import Tasks

CONTEXTS, CONTEXT_BYTES = 24, 5000
"""Beginnings that prompts share. Each has 1 300 tokens, which take an eighth of a second to compute."""
ANSWER_TOKENS, STREAM_TOKENS = (8, 16), (60, 80)
DECODE_S = 0.1
"""The time of each answer token."""
RATE_PER_S = 24.0
LONGEST_PAUSE_S = 0.5
"""A client of a fixed number sends its next request within this time after the last one's end."""
IMPATIENT_AFTER_S = 4.0
"""After this time, such a client sends its next request although the last one has not ended. So a gateway that is
frozen does not stop the load."""
_CONNECT_S = 1.0
_PATH = "/v1/chat/completions"
_WENT_ON = b"\n: x-kvgate-resumed: "
_CODE = re.compile(rb'"code": ?"(\w+)"')
_STATE, _WAITED_MS = re.compile(r"state=(\w+)"), re.compile(r"waited_ms=(\d+)")


class BadEnd(Exception):
    """The answer is not complete."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end, self.detail = end, detail


@dataclass
class _Asking:
    """A request that is running."""

    sent_s: float
    max_tokens: int
    streams: bool
    gateway: int | None = None
    replica: str = ""
    state: str = ""
    head_s: float | None = None
    late_s: float = 0.0
    waited_s: float = 0.0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def seen(self, end: End, ended_s: float, detail: str = "") -> Seen:
        return Seen(
            self.sent_s,
            end,
            ended_s,
            self.streams,
            self.gateway,
            self.replica,
            self.state,
            self.head_s,
            self.late_s,
            self.waited_s,
            detail,
            _WENT_ON in self.body,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """A gateway's prediction for a prompt, and the tokens that the engine really had in its cache."""

    replica: str
    state: str
    matched_tokens: int
    boundary_tokens: int
    cached_tokens: int

    @property
    def is_right(self) -> bool:
        """Right within one block, as in bench/load.py."""
        least, most = self.matched_tokens - BLOCK_TOKENS, self.boundary_tokens + BLOCK_TOKENS
        return least <= self.cached_tokens <= most


class Load:
    """Sends requests from `start` until `stop`. Then `finish` waits for the running ones."""

    def __init__(self, http: aiohttp.ClientSession, balancer: Balancer, clients: int = 0, seed: int = 1) -> None:
        """Without a number of clients, requests come at a steady rate."""
        self._http = http
        self.balancer = balancer
        self._rng = random.Random(seed)
        self.contexts = [text(self._rng, CONTEXT_BYTES) for _ in range(CONTEXTS)]
        self._numbers = itertools.count()
        self._tasks = Tasks()
        self._asking: set[asyncio.Task[Any]] = set()
        self._clients = clients
        self._senders: list[asyncio.Task[None]] = []
        self.seen: list[Seen] = []

    @property
    def answered_within_s(self) -> float:
        """A request takes less, unless a fault holds it."""
        return 6.5 if self._clients else 2.5

    @property
    def in_flight(self) -> int:
        return len(self._asking)

    async def warm_up(self) -> None:
        """Sends each beginning once, a few at a time."""
        for some in _batched(self.contexts, 6):
            await asyncio.gather(*(self.predict(context) for context in some))

    def start(self) -> None:
        if self._clients:
            self._senders = [self._tasks.spawn(self._keep_asking(), "client") for _ in range(self._clients)]
        else:
            self._senders = [self._tasks.spawn(self._keep_pace(), "pace")]

    def stop(self) -> None:
        for sender in self._senders:
            sender.cancel()

    async def finish(self, within_s: float) -> None:
        """Waits this long. Requests that are still running then count as unanswered."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=within_s)
        await self._tasks.close()

    async def _keep_pace(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            self._send_next()
            due_s += self._rng.expovariate(RATE_PER_S)
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _keep_asking(self) -> None:
        """One of a fixed number of clients."""
        while True:
            await asyncio.sleep(self._rng.uniform(0, LONGEST_PAUSE_S))
            await asyncio.wait([self._send_next()], timeout=IMPATIENT_AFTER_S)

    def _send_next(self) -> asyncio.Task[None]:
        task = self._tasks.spawn(self._ask(), "request")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    def _body(self, context: str, max_tokens: int, streams: bool) -> dict[str, Any]:
        question = f"{context} Question {next(self._numbers)}?"
        body = {"model": "sim", "max_tokens": max_tokens, "messages": [{"role": "user", "content": question}]}
        return body | ({"stream": True} if streams else {})

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        streams = self._rng.random() < 0.5
        # A fixed number of clients wait for each other's answers: long ones would make the queue grow without end.
        tokens = STREAM_TOKENS if streams and not self._clients else ANSWER_TOKENS
        asking = _Asking(loop.time(), self._rng.randint(*tokens), streams)
        body = self._body(self._rng.choice(self.contexts), asking.max_tokens, asking.streams)
        try:
            await self._send(asking, body)
            seen = asking.seen(End.COMPLETE, loop.time())
        except BadEnd as bad:
            seen = asking.seen(bad.end, loop.time(), bad.detail)
        except (aiohttp.ClientError, OSError) as error:
            seen = asking.seen(End.BROKEN, loop.time(), type(error).__name__)
        except asyncio.CancelledError:
            self.seen.append(asking.seen(End.UNANSWERED, loop.time(), "no answer"))
            raise
        self.seen.append(seen)

    async def _send(self, asking: _Asking, body: dict[str, Any]) -> None:
        for gateway in self.balancer.order():
            try:
                response = await self._post(gateway, body, asking)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                continue
            async with response:
                await self._read(asking, response)
            return
        raise BadEnd(End.REFUSED, "refused")

    async def _post(self, gateway: int, body: dict[str, Any], asking: _Asking) -> aiohttp.ClientResponse:
        asking.gateway = gateway
        try:
            return await self._http.post(self.balancer.urls[gateway] + _PATH, json=body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            asking.gateway = None
            raise

    async def _read(self, asking: _Asking, response: aiohttp.ClientResponse) -> None:
        """Reads an answer. Raises BadEnd if it is not complete, and aiohttp's errors."""
        loop = asyncio.get_running_loop()
        asking.head_s = last_s = loop.time()
        asking.headers = {name.lower(): value for name, value in response.headers.items()}
        asking.replica = asking.headers.get("x-kvgate-replica", "")
        decision = asking.headers.get("x-kvgate-decision", "")
        if state := _STATE.search(decision):
            asking.state = state[1]
        if waited_ms := _WAITED_MS.search(decision):
            asking.waited_s = int(waited_ms[1]) / 1000
        streams = response.status == 200 and asking.streams
        last_s = asking.sent_s if streams else last_s
        async for piece in response.content.iter_any():
            asking.body += piece
            if streams:
                asking.late_s, last_s = max(asking.late_s, loop.time() - last_s), loop.time()
        if response.status != 200:
            raise BadEnd(End.STATUS, f"{response.status} {_code(asking.body)}".strip())
        if not asking.streams:
            asking.late_s = loop.time() - asking.sent_s - asking.max_tokens * DECODE_S
        elif b"data: [DONE]" not in asking.body or b'"error"' in asking.body:
            raise BadEnd(End.ERROR_EVENT, _code(asking.body) or "ended early")

    async def predict(self, context: str, gateway: int | None = None) -> Prediction:
        """Sends a request and compares its prediction with the engine's figures. Raises BadEnd, TimeoutError and
        aiohttp's errors."""
        order = self.balancer.order() if gateway is None else [gateway]
        asking = _Asking(0.0, 1, streams=False)
        async with asyncio.timeout(20), await self._post(order[0], self._body(context, 1, False), asking) as response:
            await self._read(asking, response)
        details = orjson.loads(asking.body)["usage"].get("prompt_tokens_details") or {}
        matched, boundary = (int(asking.headers[f"x-kvgate-{name}-tokens"]) for name in ("matched", "next-boundary"))
        return Prediction(asking.replica, asking.state, matched, boundary, details.get("cached_tokens") or 0)


def _batched(contexts: Sequence[str], size: int) -> list[Sequence[str]]:
    return [contexts[at : at + size] for at in range(0, len(contexts), size)]


def _code(body: bytes) -> str:
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def client() -> aiohttp.ClientSession:
    """A client without a timeout: requests that a fault holds are watched to their end."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
    )
