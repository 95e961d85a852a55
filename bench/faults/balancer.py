"""The clients' load balancer. It knows which gateways are ready. If a gateway refuses a connection, or does not accept
it within a second, it tries the next one. It never sends a request twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

_LOOK_S, _ANSWER_S = 1.0, 1.0
"""How often it asks /ready, and how long it waits for the answer."""


class Balancer:
    """Gateways by number."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self._is_ready = [True] * len(urls)
        self._is_in = [True] * len(urls)
        self._turn = 0

    def take_out(self, gateway: int) -> None:
        """Sends no new request to this gateway until it is put back in, as before an upgrade."""
        self._is_in[gateway] = False

    def put_in(self, gateway: int) -> None:
        self._is_in[gateway] = self._is_ready[gateway] = True

    def order(self) -> list[int]:
        """The gateways to try for the next request: the ready ones in turn, then the others."""
        self._turn += 1
        count = len(self.urls)
        turn = [(self._turn + step) % count for step in range(count)]
        return sorted(turn, key=lambda gateway: not (self._is_ready[gateway] and self._is_in[gateway]))

    async def look(self, http: aiohttp.ClientSession) -> None:
        """Asks all gateways for /ready again and again, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for gateway in range(len(self.urls)):
                group.create_task(self._look_at(http, gateway))

    async def _look_at(self, http: aiohttp.ClientSession, gateway: int) -> None:
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S), http.get(f"{self.urls[gateway]}/ready") as answer:
                    self._is_ready[gateway] = answer.status == 200
            except (aiohttp.ClientError, OSError, TimeoutError):
                self._is_ready[gateway] = False
            await asyncio.sleep(_LOOK_S)
