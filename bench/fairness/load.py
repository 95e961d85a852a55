"""The clients of tenants: at a rate, whatever happened to earlier requests, or one request after the other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as numbers
from typing import Any

from bench.fairness.tenants import Tenant
from bench.fleet.client import Answer, Client, NoAnswer
from bench.load import MODEL
from bench.routing.mixes import BYTES_PER_TOKEN
from bench.workloads import text
from gateway.routing.tenants import OUTPUT_WEIGHT

_ANSWER_S = 600.0
_REFUSED_S = 0.1
"""The pause of a client that sends one request after the other, after a refusal."""


@dataclass(slots=True)
class Sent:
    """One answered request. Times are those of the loop's clock."""

    tenant: str
    sent_s: float
    first_byte_s: float
    ended_s: float
    uncached_tokens: int
    output_tokens: int
    decision: str
    """Why the gateway chose the replica; empty if there is no gateway."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float:
        return self.first_byte_s - self.sent_s

    @property
    def charge_tokens(self) -> int:
        """What its tenant is charged of its share."""
        return self.uncached_tokens + OUTPUT_WEIGHT * self.output_tokens


class Load:
    """The requests of all tenants. What came of them is counted from the last `count_from_now`."""

    def __init__(self, tenants: Sequence[Tenant], urls: Sequence[str], *, streams: bool = False, seed: int = 1) -> None:
        self._urls, self._streams = urls, streams
        self._rng = random.Random(seed)
        self._numbers = numbers(1)
        self._clients = {each.name: Client(_ANSWER_S, api_key=each.name) for each in tenants}
        self.offered: Counter[str] = Counter()
        """Requests that were sent, by tenant."""
        self.sent: list[Sent] = []
        self.failed: Counter[str] = Counter()
        """Requests without an answer, by tenant and reason."""

    def count_from_now(self) -> None:
        self.offered.clear()
        self.sent.clear()
        self.failed.clear()

    def of(self, tenant: str) -> list[Sent]:
        return [each for each in self.sent if each.tenant == tenant]

    async def offer(self, tenant: Tenant, rate_per_s: float, at_once: int = 0) -> None:
        """Sends requests at random moments at this rate, and `at_once` before, until it is cancelled."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with asyncio.TaskGroup() as running:
            for _ in range(at_once):
                running.create_task(self.ask(tenant))
            while True:
                due_s += self._rng.expovariate(rate_per_s)
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                running.create_task(self.ask(tenant))

    async def keep_asking(self, tenant: Tenant, url: str) -> None:
        """Sends one request after the other to `url`, until it is cancelled."""
        while True:
            if not await self.ask(tenant, url):
                await asyncio.sleep(_REFUSED_S)

    async def ask(self, tenant: Tenant, url: str | None = None) -> Sent | None:
        """Sends one request. Returns None if it got no answer."""
        loop = asyncio.get_running_loop()
        self.offered[tenant.name] += 1
        sent_s = loop.time()
        try:
            answer = await self._clients[tenant.name].post(url or self._url(tenant), self._body(tenant))
            sent = self._read(tenant, sent_s, loop.time(), answer)
        except NoAnswer as error:
            self.failed[f"{tenant.name}: {error}"] += 1
            return None
        self.sent.append(sent)
        return sent

    def _url(self, tenant: Tenant) -> str:
        return self._urls[0] if tenant.is_on_one_gateway else self._rng.choice(self._urls)

    def _body(self, tenant: Tenant) -> dict[str, Any]:
        content = f"{next(self._numbers)} {text(self._rng, tenant.prompt_tokens * BYTES_PER_TOKEN)}"
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": self._rng.randint(tenant.output_tokens // 2, tenant.output_tokens * 3 // 2),
            "ignore_eos": True,
            "messages": [{"role": "user", "content": content}],
        }
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if self._streams else {})

    def _read(self, tenant: Tenant, sent_s: float, ended_s: float, answer: Answer) -> Sent:
        _, usage = answer.read(self._streams)
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Sent(
            tenant.name,
            sent_s,
            answer.first_byte_s,
            ended_s,
            usage["prompt_tokens"] - cached_tokens,
            usage["completion_tokens"],
            answer.decision,
        )

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@contextmanager
def running(tasks: asyncio.TaskGroup, coroutines: Iterable[Any]) -> Iterator[None]:
    """Runs them beside what is inside, and cancels them at its end."""
    started = [tasks.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        for task in started:
            task.cancel()


def per_s(counts: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {name: round(count / seconds, 2) for name, count in counts.items()}
