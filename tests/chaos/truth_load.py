"""Clients that go on asking while a test does what it does."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import httpx

from gateway.tasks import Tasks
from tests.chaos.truth_stage import Answer, TruthStage


class Askers:
    """A context: clients that ask for these prompts in turn, through one gateway or another, until it is left. Those
    for whom a gateway is gone (`gateways_may_die`) ask the next one."""

    def __init__(
        self,
        truth: TruthStage,
        texts: Sequence[str],
        clients: int = 2,
        urls: Sequence[str] = (),
        gateways_may_die: bool = False,
    ) -> None:
        self.answers: list[Answer] = []
        self.died = 0
        """Requests that broke with their gateway."""
        self._truth = truth
        self._texts = itertools.cycle(texts)
        self._urls = itertools.cycle(urls or truth.urls)
        self._clients = clients
        self._gateways_may_die = gateways_may_die
        self._is_leaving = False
        self._tasks = Tasks()
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Askers:
        self._running = [self._tasks.spawn(self._ask(), f"client {number}") for number in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_leaving = True
        try:
            await asyncio.gather(*self._running)
        finally:
            await self._tasks.close()

    async def _ask(self) -> None:
        while not self._is_leaving:
            try:
                self.answers.append(await self._truth.ask(next(self._texts), url=next(self._urls)))
            except httpx.TransportError:
                if not self._gateways_may_die:
                    raise
                self.died += 1
                await asyncio.sleep(random.uniform(0.01, 0.05))

    def overpredicted(self) -> list[Answer]:
        """Answers for which less was cached than promised."""
        return [answer for answer in self.answers if answer.is_overpredicted]
