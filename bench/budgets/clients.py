"""The clients of tenants: they spend budgets, and count what they were served."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count as numbers
from typing import Any

import aiohttp
import orjson

from bench.cluster import Cluster
from bench.load import MODEL

INPUT, OUTPUT = 1_000_000, 4_000_000
"""Nanos for a token."""
_OUTPUT_TOKENS, _PROMPT_TOKENS = range(4, 13), 64
WORTH = _PROMPT_TOKENS * INPUT + 8 * OUTPUT
"""The cost of an average request, about."""
_HANG_UP_SHARE, _PAUSE_S = 0.05, 0.25
_ABORTED_S = 0.5
"""Within this time an engine has stopped to compute for a client that is gone."""


@dataclass
class Tenant:
    """What its clients have seen. Money is in nanos."""

    name: str
    budget: int
    served: int = 0
    computed: int = 0
    """What engines computed for broken requests beyond what their clients saw. Nobody else knows it."""
    charged: int = 0
    """What Redis has as spent in the end."""
    in_flight: int = 0
    most_in_flight: int = 0
    unseen: int = 0
    """The most that broken requests can have cost beyond what their clients saw."""
    outcomes: Counter[str] = field(default_factory=Counter)
    refused_by_served: int = 0
    """False refusals, if only what was served counts as spent."""
    false_refusals: int = 0
    not_explained: int = 0
    most_left: float = 0.0
    """At a false refusal, in average requests."""

    @property
    def over(self) -> int:
        return self.served - self.budget

    def begins(self, most: int) -> None:
        self.in_flight += most
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def ends(self, most: int, counted: int, outcome: str) -> None:
        self.in_flight -= most
        self.outcomes[outcome] += 1
        if outcome in {"cut", "hung up"}:
            self.unseen += max(0, most - counted)
        left = self.budget - self.served
        if outcome == "budget_exceeded" and left > most:
            self.refused_by_served += 1
        left -= self.computed
        if outcome == "budget_exceeded" and left > most:
            self.false_refusals += 1
            self.not_explained += left - self.unseen - self.in_flight > most
            self.most_left = max(self.most_left, left / WORTH)


class Clients:
    """Those of all tenants."""

    def __init__(self, cluster: Cluster, tenants: list[Tenant], http: aiohttp.ClientSession) -> None:
        self._urls, self._tenants, self._http = cluster.gateway_urls, tenants, http
        self._replica_urls = [replica.url for replica in cluster.replicas]
        self._dice, self._numbers, self._prompt_tokens = random.Random(1), numbers(), _PROMPT_TOKENS
        self.spent_half = asyncio.Event()

    async def spend(self, tenant: Tenant) -> None:
        """Asks until the budget is used up."""
        while True:
            body, hangs_up = self._body(self._dice.choice(_OUTPUT_TOKENS)), self._dice.random() < _HANG_UP_SHARE
            while (outcome := await self.ask(tenant, body, 2 if hangs_up else 0)) != "served":
                hangs_up = False
                if outcome == "budget_exceeded":
                    return
                await asyncio.sleep(self._dice.uniform(0, 2 * _PAUSE_S))
            await asyncio.sleep(self._dice.uniform(0, 2 * _PAUSE_S))

    async def finish(self, tenant: Tenant) -> None:
        """Uses up what is left, with the smallest requests, one at a time."""
        while True:
            if await self.ask(tenant, self._body(_OUTPUT_TOKENS[0]), 0) == "budget_exceeded":
                return
            await asyncio.sleep(_PAUSE_S)

    async def ask(self, tenant: Tenant, body: dict[str, Any], hangs_up_after: int) -> str:
        """Sends a request to any gateway. Returns what came of it, or the error's code."""
        most = self._prompt_tokens * INPUT + body["max_tokens"] * OUTPUT
        counted, outcome, name = 0, "cut", f"{tenant.name}-{next(self._numbers)}"
        headers = {"authorization": f"Bearer {tenant.name}", "x-request-id": name}
        tenant.begins(most)
        try:
            url = f"{self._dice.choice(self._urls)}/v1/chat/completions"
            async with self._http.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    outcome = (await answer.json())["error"]["code"]
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]"):
                        outcome = "served"
                    elif line.startswith(b"data: ") and (used := orjson.loads(line[6:]).get("usage")):
                        self._prompt_tokens = max(self._prompt_tokens, used["prompt_tokens"])
                        cost = used["prompt_tokens"] * INPUT + used["completion_tokens"] * OUTPUT
                        tenant.served += cost - counted
                        counted = cost
                        if hangs_up_after and used["completion_tokens"] >= hangs_up_after:
                            outcome = "hung up"
                            break
        except aiohttp.ClientConnectorError:
            outcome = "not reached"
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            outcome = "cut"
        if outcome in {"cut", "hung up"}:
            tenant.computed += max(0, await self._computed(name) - counted)
        tenant.ends(most, counted, outcome)
        if sum(each.served for each in self._tenants) > sum(each.budget for each in self._tenants) / 2:
            self.spent_half.set()
        return outcome

    async def _computed(self, name: str) -> int:
        """What engines computed for a request whose client is gone; its prompt only if it had a token of its answer."""
        await asyncio.sleep(_ABORTED_S)
        cost = 0
        for url in self._replica_urls:
            async with self._http.get(f"{url}/sim/state") as answer:
                for one in (await answer.json())["recent"]:
                    if one["request_id"] == name and one["completion_tokens"]:
                        cost += one["prompt_tokens"] * INPUT + one["completion_tokens"] * OUTPUT
        return cost

    def _body(self, max_tokens: int) -> dict[str, Any]:
        words = " ".join(self._dice.choices(("river", "stone", "light", "paper", "cloud"), k=30))
        return {
            "model": MODEL,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "messages": [{"role": "user", "content": f"{next(self._numbers):06d} {words}"}],
        }
