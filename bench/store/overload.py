"""Measures what is left of placements when gateways want more of them than Redis can make.

Several gateways, each in its own process, place at rates that do not depend on the answers. First the capacity is
measured, then the load is one, two and four times as much, and at last half of it. A request that the store does not
place in its budget is placed by the rule without the store, as the router does it.

Scripts are slowed down fourfold. So gateways on the same machine can ask for four times what Redis can do, without
taking its core.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count

from bench.embedded import CAPACITY_TOKENS, INCARNATION, Load, connect, usage
from bench.place import random_keys
from bench.store.beside import Found, Start, company
from bench.store.requests import CHAIN_KEYS, SHAPE, TOKENS, known_chains
from coordinator import scripts
from coordinator.errors import StoreError
from coordinator.pool.pool import Pool, Reservation
from coordinator.redis.wire import Wire
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
    """What Redis can place in the CPU time that it had, if it does nothing in vain. It has less of it if the machine is
    busy. Below the capacity it is idle for a part of the time."""
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

    async def serve(self) -> None:
        """One request. Its answer comes later."""
        number = self._random.randrange(len(self._chains))
        chain = self._chains[number]
        if self._random.random() < _NEW_SHARE:
            chain = chain[: CHAIN_KEYS // 2] + random_keys(CHAIN_KEYS - CHAIN_KEYS // 2)
        reservation, seed = f"{self._pool.gateway}-{next(self._ids):x}", self._random.getrandbits(31)
        request = PlaceRequest(
            reservation, chain, TOKENS, TOKENS[-1], PolicyKnobs(), seed, serving=self._subset, shape=SHAPE
        )
        began_s = time.perf_counter()
        try:
            placement = await self._pool.place(request)
            assert placement is not None
            self._store.note(POOL, None)
        except StoreError as error:
            self._store.note(POOL, error)
            self._fall_back(request, number)
        self.trips_ms.append((time.perf_counter() - began_s) * 1e3)
        loop = asyncio.get_running_loop()
        loop.call_later(_FIRST_TOKEN_S, self._pool.first_token, reservation)
        loop.call_later(_DONE_S, self._pool.done, reservation)

    def _fall_back(self, request: PlaceRequest, number: int) -> None:
        affinity = bytes.fromhex(self._chains[number][0])
        replica = first_usable(rendezvous_order(self._subset, affinity, lambda _: True), (), ())
        assert replica is not None
        self._pool.adopt(Reservation(request.reservation, replica, INCARNATION, request.prompt_tokens, request.tip))
        self.fell_back[number, replica] += 1
        self.last_fallback_s = time.monotonic() - self.began_s

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


async def _place_all_the_time(gateways: int, start: Start, url: str, seconds: float, number: int) -> Found:
    """A gateway that always has the same number of placements under way."""
    async with _connected(url, number, 10.0) as gateway:
        await start()
        begin_s = time.monotonic() + _DONE_S  # from then on, as many requests end as begin

        async def client() -> None:
            while (now_s := time.monotonic()) < begin_s + seconds:
                if now_s < begin_s:
                    gateway.begin_phase()
                await gateway.serve()

        async with asyncio.TaskGroup() as clients:
            for _ in range(_AT_ONCE // gateways):
                clients.create_task(client())
    return {"placed": float(len(gateway.trips_ms) - gateway.fell_back.total())}


async def _place_at_rates(capacity_per_s: float, start: Start, url: str, seconds: float, number: int) -> Found:
    """A gateway whose requests come at its share of the capacity, times each of FACTORS."""
    found: Found = {}
    async with _connected(url, number, StoreOptions(url).budget_s) as gateway:
        await start()
        for factor in FACTORS:
            gateway.begin_phase()
            async with asyncio.TaskGroup() as requests:
                sent = 0
                while (passed_s := time.monotonic() - gateway.began_s) < seconds / len(FACTORS):
                    due = int(passed_s * factor * capacity_per_s)
                    for _ in range(due - sent):
                        requests.create_task(gateway.serve())
                    sent = due
                    await asyncio.sleep(_TICK_S)
            found |= gateway.found(f"{factor:g}")
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


def _phase(factor: float, possible_per_s: float, seconds: float, found: list[Found]) -> Phase:
    def each(name: str) -> list[float]:
        return [one[f"{factor:g} {name}"] for one in found]

    fell_to = {
        name.removeprefix(f"{factor:g} to ") for one in found for name in one if name.startswith(f"{factor:g} to ")
    }
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
    """Measures the capacity, then the phases, with so many gateways. Each measurement takes so many seconds."""
    wire = await connect(url)
    place_all, numbers = partial(_place_all_the_time, gateways), list(range(gateways))
    with company(place_all, url, seconds, numbers) as others:
        await others.start()
        await asyncio.sleep(_DONE_S)
        load = await _load_of(wire, seconds)
        capacity_per_s = sum(one["placed"] for one in await others.found()) / seconds
    per_core_s = capacity_per_s / load.cpu_share
    with company(partial(_place_at_rates, capacity_per_s / gateways), url, seconds * len(FACTORS), numbers) as others:
        await others.start()
        loads = [await _load_of(wire, seconds) for _ in FACTORS]
        found = await others.found()
    await wire.close()
    return [
        _phase(factor, per_core_s * load.cpu_share, seconds, found) for factor, load in zip(FACTORS, loads, strict=True)
    ]


async def _load_of(wire: Wire, seconds: float) -> Load:
    before = await usage(wire)
    await asyncio.sleep(seconds)
    return (await usage(wire)).since(before)
