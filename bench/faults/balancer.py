"""What a load balancer does for clients: it knows which gateways are ready, and tries the next one where a connection
is refused, or not there within a second. It repeats nothing that it has sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

_LOOK_S, _ANSWER_S = 1.0, 1.0
"""It asks /ready as often, and gives it as long."""


class Balancer:
    """Gateways by number."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self._is_ready = [True] * len(urls)
        self._is_in = [True] * len(urls)
        self._turn = 0

    def take_out(self, gateway: int) -> None:
        """No new request goes there, as before an upgrade, until it is put back in."""
        self._is_in[gateway] = False

    def put_in(self, gateway: int) -> None:
        self._is_in[gateway] = self._is_ready[gateway] = True

    def order(self) -> list[int]:
        """The gateways to try for the next request: those that are ready, in turn, and then the others."""
        self._turn += 1
        count = len(self.urls)
        turn = [(self._turn + step) % count for step in range(count)]
        return sorted(turn, key=lambda gateway: not (self._is_ready[gateway] and self._is_in[gateway]))

    async def look(self, http: aiohttp.ClientSession) -> None:
        """Ask all of them again and again, until it is cancelled."""
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
