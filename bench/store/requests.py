"""Requests as gateways place them: mostly known prompts, and some that continue in a new way."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import count

from bench.place import TOKENS_PER_KEY, random_keys
from coordinator.placement import PlaceRequest, Used
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.spending import Bill

CHAIN_KEYS = 40
TOKENS = [TOKENS_PER_KEY * (i + 1) for i in range(CHAIN_KEYS)]
SHAPE = b'{"text_bytes":[' + b",".join([b"400"] * CHAIN_KEYS) + b"]}"
_KNOWN_CHAINS = 200
_KNOWN_SEED = 1
_NEW_SHARE = 0.1
"""The share of prompts that are known for their first half, and new after it."""


def known_chains() -> list[list[str]]:
    """The known prompts, which all gateways use again and again. They are the same in every process."""
    numbers = random.Random(_KNOWN_SEED)
    return [[numbers.randbytes(16).hex() for _ in range(CHAIN_KEYS)] for _ in range(_KNOWN_CHAINS)]


class Gateway:
    """A gateway's calls to the store for each of its requests."""

    bill: Bill | None = None
    """Of each request."""
    used: Used | None = None
    """What each request takes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known = known_chains()
        self._ids = count()
        self._random = random.Random(pool.gateway)

    async def learn(self) -> None:
        """Places every known prompt once."""
        for chain in self._known:
            await self._serve(chain)

    async def serve(self) -> float:
        """Runs one request from its placement to its end. Returns the placement's round trip in us."""
        chain = self._random.choice(self._known)
        if self._random.random() < _NEW_SHARE:
            chain = chain[: CHAIN_KEYS // 2] + random_keys(CHAIN_KEYS - CHAIN_KEYS // 2)
        return await self._serve(chain)

    async def beats(self) -> None:
        """What goes with a heartbeat for budgets."""
        self._pool.reservations.count_adopted(is_beat=True)
        await asyncio.sleep(0.002)

    async def _serve(self, chain: list[str]) -> float:
        reservation, seed = f"{self._pool.gateway}-{next(self._ids):x}", self._random.getrandbits(31)
        request = PlaceRequest(
            *(reservation, chain, TOKENS, TOKENS[-1], PolicyKnobs(), seed), shape=SHAPE, bill=self.bill
        )
        started = time.perf_counter()
        placement = await self._pool.place(request)
        took_us = (time.perf_counter() - started) * 1e6
        assert placement is not None, "the pool has lost its replicas"
        self._pool.first_token(reservation)
        await asyncio.sleep(0)  # a stream's first token and its end never come in the same turn of the loop
        self._pool.done(reservation, self.used)
        return took_us
