"""Clients of a cluster: single requests, streams that stay open, and a load in the background."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import httpx
import orjson

from gateway.tasks import Tasks
from tests.polling import eventually

CHAT = "/v1/chat/completions"
PAUSE_S = 0.05
"""The average pause of a client in the background. Without it, the load of one test takes the cores of all others."""
_WORDS = ("river", "stone", "light", "paper", "cloud", "green", "table", "north", "seven", "glass")


def api_key(name: str, text: str, tenant: str = "team", **more: Any) -> dict[str, Any]:
    """The key `text`, as security.api_keys lists it."""
    return {"name": name, "tenant": tenant, "sha256": sha256(text.encode()).hexdigest(), **more}


def prose(seed: int | str, words: int = 400) -> str:
    """A text that is different for each seed; 400 words are about 600 tokens."""
    rng = random.Random(seed)
    return f"{seed}: " + " ".join(rng.choice(_WORDS) for _ in range(words))


def chat(text: str, max_tokens: int = 2, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}], **fields}


async def records_of(http: httpx.AsyncClient, gateway: str, request_id: str) -> list[dict[str, Any]]:
    """What a gateway tells of a request, as soon as it is known."""

    async def told() -> list[dict[str, Any]]:
        found = await http.get(f"{gateway}/v1/decisions/{request_id}")
        return list(found.json()["decisions"]) if found.status_code == 200 else []

    records: list[dict[str, Any]] = await eventually(told)
    return records


async def ask(http: httpx.AsyncClient, url: str, text: str, **fields: Any) -> httpx.Response:
    """Sends one chat request and reads the whole answer."""
    return await http.post(url + CHAT, json=chat(text, **fields))


def is_complete(response: httpx.Response) -> bool:
    """Whether a client would see a whole answer."""
    if response.status_code != 200:
        return False
    if response.headers["content-type"].startswith("text/event-stream"):
        return response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
    return response.json()["choices"][0]["finish_reason"] is not None


def last_event(text: str) -> Any:
    """The JSON in the last event of a stream."""
    lines = text.strip().rsplit("\n\n", 1)[-1].splitlines()
    return orjson.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))


class HeldStream:
    """A streamed answer in progress: its first event has been read."""

    def __init__(self, response: httpx.Response, text: AsyncIterator[str], first: str) -> None:
        self.replica = response.headers["x-kvgate-replica"]
        self.decision = response.headers["x-kvgate-decision"]
        self.request_id = response.headers["x-request-id"]
        self.text = first
        self._response = response
        self._text = text

    async def goes_on(self) -> bool:
        """Whether the stream continues: reads its next piece, which must not be an error."""
        piece = await anext(self._text)
        self.text += piece
        return '"error"' not in piece

    async def rest(self) -> str:
        """Reads to the end and returns the whole stream. Raises httpx.TransportError if the stream was cut."""
        async for text in self._text:
            self.text += text
        return self.text

    async def hang_up(self) -> None:
        await self._response.aclose()


@asynccontextmanager
async def held_stream(
    http: httpx.AsyncClient, url: str, text: str, max_tokens: int = 4000, **fields: Any
) -> AsyncIterator[HeldStream]:
    """A stream that by default lasts longer than a test. Its client hangs up at the end of the context."""
    async with http.stream("POST", url + CHAT, json=chat(text, max_tokens, stream=True, **fields)) as response:
        assert response.status_code == 200, await response.aread()
        pieces = response.aiter_text()
        yield HeldStream(response, pieces, await anext(pieces))


class Load:
    """Clients that send plain and streamed requests to random gateways until `stop`."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        urls: Sequence[str],
        seed: int = 1,
        max_tokens: tuple[int, int] = (1, 4),
        model: str = "sim",
    ) -> None:
        self._http = http
        self._urls = urls
        self._rng = random.Random(seed)
        self._contexts = [prose(f"context {seed} {n}") for n in range(6)]
        self._max_tokens = max_tokens
        self._model = model
        self._is_stopping = False
        self._count = 0
        self.answered = 0
        self.states: Counter[str] = Counter()
        """The number of answers by the state in their decision: exact, degraded or fallback."""
        self.broken = 0
        """The number of streams that ended with an error event because their replica died."""
        self.failures: list[str] = []
        """All other answers that are not whole."""

    async def _client(self) -> None:
        while not self._is_stopping:
            self._count += 1
            text = f"{self._rng.choice(self._contexts)} question {self._count}"
            url = self._rng.choice(self._urls)
            try:
                response = await ask(
                    self._http,
                    url,
                    text,
                    model=self._model,
                    max_tokens=self._rng.randint(*self._max_tokens),
                    stream=self._rng.random() < 0.5,
                )
            except httpx.TransportError as error:
                self.failures.append(f"{url}: {error!r}")
            else:
                self._note(url, response)
            await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))

    def _note(self, url: str, response: httpx.Response) -> None:
        if is_complete(response):
            self.answered += 1
            self.states[response.headers["x-kvgate-decision"].rsplit("state=", 1)[1].partition(";")[0]] += 1
        elif response.status_code == 200 and last_event(response.text).get("error", {}).get("code") == "stream_broken":
            self.broken += 1
        else:
            self.failures.append(f"{url}: {response.status_code} {response.text[-300:]}")

    def stop(self) -> None:
        """Sends no more requests after those in flight."""
        self._is_stopping = True


@asynccontextmanager
async def running_load(load: Load, clients: int = 6) -> AsyncIterator[Load]:
    """Keep this many clients busy. On exit, wait for the answers to all requests in flight."""
    tasks = Tasks()
    running = [tasks.spawn(load._client(), f"client {n}") for n in range(clients)]
    try:
        yield load
        load.stop()
        await asyncio.gather(*running)
    finally:
        load.stop()
        await tasks.close()
