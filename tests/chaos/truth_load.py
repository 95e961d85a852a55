"""Clients that send requests in the background of a test."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import httpx

from gateway.tasks import Tasks
from tests.chaos.truth_stage import Answer, TruthStage
from tests.cluster.clients import PAUSE_S


class Askers:
    """A context in which clients send these prompts in turn, through all gateways in turn. With `gateways_may_die`, a
    client whose gateway is gone uses the next one."""

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
        """The number of requests that broke because their gateway died."""
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
            await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))

    def overpredicted(self) -> list[Answer]:
        """Answers with fewer cached tokens than predicted."""
        return [answer for answer in self.answers if answer.is_overpredicted]
