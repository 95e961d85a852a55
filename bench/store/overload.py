"""Measures what is left of placements when gateways want more of them than Redis can make.

Several gateways, each in its own process, place at rates that do not depend on the answers: as fast as Redis can at
most, two and four times as fast, and at last half as fast. A request that the store does not place in its budget is
placed by the rule without the store, as the router does it.

How fast Redis can is measured for each load by itself: gateways always have some placements under way, and serve the
rest of the load without the store. They need processors and caches for it, so each script takes longer than on a quiet
machine.

Scripts are slowed down fourfold. So gateways on the same machine can ask for four times what Redis can do, without
taking its core.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

from bench.embedded import CAPACITY_TOKENS, INCARNATION
from bench.place import random_keys
from bench.store.beside import Found, Start, company
from bench.store.requests import CHAIN_KEYS, SHAPE, TOKENS, known_chains
from coordinator import scripts
from coordinator.errors import StoreError
from coordinator.pool.pool import Pool, Reservation
from coordinator.registry import ReplicaRecord
from coordinator.scripts import PlaceRequest, PolicyKnobs
from coordinator.store import Store, StoreOptions
from coordinator.subset import Subset
from gateway.routing.rendezvous import first_usable, rendezvous_order

POOL = "bench-overload"
REPLICAS = 8
FACTORS = (1.0, 2.0, 4.0, 0.5)
"""Of the capacity, one after another."""
_AT_ONCE = 32
"""Placements under way while the capacity is measured, of all gateways: about as many as Redis can make in a budget."""
_FIRST_TOKEN_S = 0.1
_DONE_S = 0.6
_NEW_SHARE = 0.1
_TICK_S = 0.002
SLOWNESS = 4
"""Of scripts."""


@dataclass(frozen=True)
class Phase:
    """All gateways together, while the load is `factor` times the capacity. Latencies are those of the slowest
    gateway."""

    factor: float
    possible_per_s: float
    """What Redis places if it never has more to do than it can, while gateways serve the rest without it."""
    asked_per_s: float
    placed_per_s: float
    """By the store."""
    fell_back_per_s: float
    p50_ms: float
    p99_ms: float
    disagreeing: int
    """Prompts that fell back to different replicas."""
    last_fallback_s: float
    """The time of the last request that fell back, from the beginning of the phase."""
    interruptions: int
    """How often a gateway stopped placing through the store."""


class _Gateway:
    """A gateway's placements, by the store or without it."""

    def __init__(self, store: Store, pool: Pool) -> None:
        self._store, self._pool = store, pool
        self._chains = known_chains()
        self._subset = Subset.of(pool.records)
        self._ids = count()
        self._random = random.Random(pool.gateway)
        self.begin_phase()

    def begin_phase(self) -> None:
        self.began_s = time.monotonic()
        self.trips_ms: list[float] = []
        self.fell_back: Counter[tuple[int, str]] = Counter()
        self.last_fallback_s = 0.0
        self.interruptions = 0

    def changed(self, is_up: bool, _reason: str) -> None:
        self.interruptions += not is_up

    def _next(self) -> tuple[int, PlaceRequest]:
        number = self._random.randrange(len(self._chains))
        chain = self._chains[number]
        if self._random.random() < _NEW_SHARE:
            chain = chain[: CHAIN_KEYS // 2] + random_keys(CHAIN_KEYS - CHAIN_KEYS // 2)
        reservation, seed = f"{self._pool.gateway}-{next(self._ids):x}", self._random.getrandbits(31)
        return number, PlaceRequest(
            reservation, chain, TOKENS, TOKENS[-1], PolicyKnobs(), seed, serving=self._subset, shape=SHAPE
        )

    async def serve(self) -> bool:
        """One request, whose answer comes later. Returns whether the store placed it."""
        number, request = self._next()
        began_s = time.perf_counter()
        try:
            placement = await self._pool.place(request)
            assert placement is not None
            is_placed = True
            self._store.note(POOL, None)
        except StoreError as error:
            is_placed = False
            self._store.note(POOL, error)
            self._pool.adopt(self._fall_back(request, number))
        self.trips_ms.append((time.perf_counter() - began_s) * 1e3)
        self._answer_later(request)
        return is_placed

    async def serve_without_store(self) -> None:
        """The same, but the store never hears of it."""
        number, request = self._next()
        self._fall_back(request, number)
        self._answer_later(request)

    def _answer_later(self, request: PlaceRequest) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(_FIRST_TOKEN_S, self._pool.first_token, request.reservation)
        loop.call_later(_DONE_S, self._pool.done, request.reservation)

    def _fall_back(self, request: PlaceRequest, number: int) -> Reservation:
        affinity = bytes.fromhex(self._chains[number][0])
        replica = first_usable(rendezvous_order(self._subset, affinity, lambda _: True), (), ())
        assert replica is not None
        self.fell_back[number, replica] += 1
        self.last_fallback_s = time.monotonic() - self.began_s
        return Reservation(request.reservation, replica, INCARNATION, request.prompt_tokens, request.tip)

    def found(self, phase: str) -> Found:
        trips_ms = sorted(self.trips_ms)
        found = {
            "asked": float(len(trips_ms)),
            "fell_back": float(self.fell_back.total()),
            "p50_ms": trips_ms[len(trips_ms) // 2],
            "p99_ms": trips_ms[len(trips_ms) * 99 // 100],
            "last_fallback_s": self.last_fallback_s,
            "interruptions": float(self.interruptions),
        }
        found |= {f"to {number} {replica}": 1.0 for number, replica in self.fell_back}
        return {f"{phase} {name}": value for name, value in found.items()}


@asynccontextmanager
async def _connected(url: str, number: int, budget_s: float) -> AsyncIterator[_Gateway]:
    """A gateway with its connection and heartbeats, in a pool whose replicas are registered."""
    _slow_scripts()
    store = Store(StoreOptions(url, budget_s=budget_s), f"gateway-{number}.bench0")
    pool, is_up = store.pool(POOL), asyncio.Event()
    store.on_change = lambda _up, _reason: is_up.set()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(store.run())
        await is_up.wait()
        for i in range(REPLICAS):
            record = ReplicaRecord(f"r{i}", INCARNATION, "ready", CAPACITY_TOKENS, 0, f"http://127.0.0.1:{i}")
            await pool.register(record, only_if_absent=True)
        gateway = _Gateway(store, pool)
        store.on_change = gateway.changed
        yield gateway
        running.cancel()


async def _place_all_the_time(
    gateways: int, others_per_s: float, start: Start, url: str, seconds: float, number: int
) -> Found:
    """A gateway that always has the same number of placements under way. Other requests come to it, so many a second,
    which it serves without the store."""
    async with _connected(url, number, 10.0) as gateway:
        await start()
        begin_s = time.monotonic() + _DONE_S  # from then on, as many requests end as begin
        placed = 0

        async def client() -> None:
            nonlocal placed
            while (now_s := time.monotonic()) < begin_s + seconds:
                is_placed = await gateway.serve()
                placed += is_placed and now_s >= begin_s

        async with asyncio.TaskGroup() as clients:
            for _ in range(_AT_ONCE // gateways):
                clients.create_task(client())
            await _ask_at_rate(gateway.serve_without_store, others_per_s, begin_s + seconds - time.monotonic())
    return {"placed": float(placed)}


async def _ask_at_rate(serve: Callable[[], Coroutine[Any, Any, object]], per_s: float, seconds: float) -> None:
    """Requests that come at a rate, whether earlier ones are placed or not."""
    began_s, sent = time.monotonic(), 0
    async with asyncio.TaskGroup() as requests:
        while (passed_s := time.monotonic() - began_s) < seconds:
            due = int(passed_s * per_s)
            for _ in range(due - sent):
                requests.create_task(serve())
            sent = due
            await asyncio.sleep(_TICK_S)


async def _place_at_rates(
    rates_per_s: list[float], phase_s: float, start: Start, url: str, _seconds: float, number: int
) -> Found:
    """A gateway to which requests come at one rate after another."""
    found: Found = {}
    async with _connected(url, number, StoreOptions(url).budget_s) as gateway:
        await start()
        for phase, per_s in enumerate(rates_per_s):
            gateway.begin_phase()
            await _ask_at_rate(gateway.serve, per_s, phase_s)
            found |= gateway.found(str(phase))
    return found


def _slow_scripts() -> None:
    """Lets each script of this process take SLOWNESS times as long in Redis."""
    source = scripts.source

    @cache
    def slowed(name: str, knobs: PolicyKnobs | None = None) -> str:
        return f"""local function run()
{source(name, knobs)}
end
local began = os.clock()
local reply = run()
local ended = os.clock()
while os.clock() - ended < {SLOWNESS - 1} * (ended - began) do end
return reply
"""

    scripts.source = slowed
    scripts.load.cache_clear()


def _phase(number: int, factor: float, possible_per_s: float, seconds: float, found: list[Found]) -> Phase:
    def each(name: str) -> list[float]:
        return [one[f"{number} {name}"] for one in found]

    fell_to = {name.removeprefix(f"{number} to ") for one in found for name in one if name.startswith(f"{number} to ")}
    prompts = Counter(one.split(" ")[0] for one in fell_to)
    asked, fell_back = sum(each("asked")), sum(each("fell_back"))
    return Phase(
        factor,
        possible_per_s,
        asked / seconds,
        (asked - fell_back) / seconds,
        fell_back / seconds,
        max(each("p50_ms")),
        max(each("p99_ms")),
        sum(replicas > 1 for replicas in prompts.values()),
        max(each("last_fallback_s")),
        int(sum(each("interruptions"))),
    )


async def overload(url: str, gateways: int, seconds: float) -> list[Phase]:
    """Measures what is possible, then the phases, with so many gateways. Each measurement takes so many seconds."""
    first_per_s = await _possible_per_s(url, gateways, seconds, 0.0)
    await _asked_at_rates(url, gateways, seconds, 2 * first_per_s)  # so that prompts have as many owners as later
    quiet_per_s = await _possible_per_s(url, gateways, seconds, 0.0)
    possible = [
        await _possible_per_s(url, gateways, seconds, (factor - 1) * quiet_per_s) if factor > 1 else quiet_per_s
        for factor in FACTORS
    ]
    found = await _asked_at_rates(url, gateways, seconds, *(factor * quiet_per_s for factor in FACTORS))
    return [
        _phase(number, factor, per_s, seconds, found)
        for number, (factor, per_s) in enumerate(zip(FACTORS, possible, strict=True))
    ]


async def _asked_at_rates(url: str, gateways: int, seconds: float, *rates_per_s: float) -> list[Found]:
    place = partial(_place_at_rates, [rate_per_s / gateways for rate_per_s in rates_per_s], seconds)
    with company(place, url, seconds * len(rates_per_s), _all(gateways)) as all_of:
        await all_of.start()
        await asyncio.sleep(seconds * len(rates_per_s))
        return await all_of.found()


async def _possible_per_s(url: str, gateways: int, seconds: float, others_per_s: float) -> float:
    place_all = partial(_place_all_the_time, gateways, others_per_s / gateways)
    with company(place_all, url, seconds, _all(gateways)) as all_of:
        await all_of.start()
        await asyncio.sleep(_DONE_S + seconds)
        return sum(one["placed"] for one in await all_of.found()) / seconds


def _all(gateways: int) -> list[int]:
    return list(range(gateways))
