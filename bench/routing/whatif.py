"""Tries out cost expressions: runs the mixes on simulated engines in virtual time, in seconds instead of hours.

There is no HTTP, no Redis and no clock. The router knows every cache, as if each event were applied at once, and counts
a prompt's blocks from its placement on. A request takes a millisecond to its replica and one back. Check a good result
with `python -m bench.routing`, which runs the real system.

    python -m bench.routing.whatif --mixes chat,vqa --seeds 1-10 charged=2 charged=3,copy=8 request=0
    python -m bench.routing.whatif --replicas 8,64,240,1000 --seeds 1 candidates=on
    python -m bench.routing.whatif --mixes chat,vqa slow=4 slow=4,speeds=off

Each argument is a variant of the weights of coordinator/lua/lib/costs.lua. The first line shows the unchanged
expression, over all replicas. With candidates=on, the router looks at a few replicas of a fleet of more than 16: see
bench/routing/candidates.py. With slow=4, every second replica takes four times as long for everything; with speeds=off,
the router does not know.

--replicas scales each mix to fleets of other sizes: sessions, contexts and concurrency grow alike, so each replica's
load and working set stay the same. There each replica gets at most --requests requests, so that a run of 1 000 replicas
takes a minute or two.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import mean, pstdev

from rich.console import Console
from rich.table import Table

from bench import tables
from bench.load import BLOCK_TOKENS, MODEL, Body, Turns, percentile
from bench.options import count, counts, names
from bench.routing.candidates import LOOK_AT_ALL, Candidates, Load, occupied_tokens
from bench.routing.fleets import DECODE_S_PER_TOKEN, PREFILL_TOKENS_PER_S
from bench.routing.mixes import MIXES, Mix, Workload
from bench.workloads import Session
from gateway.simulator.cache import Block, BlockCache
from gateway.simulator.engine import SimEngine
from gateway.simulator.generation import Generation
from gateway.simulator.openai_api import chat_prompt
from gateway.simulator.planning import plan
from gateway.simulator.prompt import BlockHasher
from gateway.simulator.replica import SimReplica
from gateway.simulator.sequence import EventTag
from gateway.simulator.settings import SimSettings

_WAY_S = 0.001
_HIT_SAMPLE = 8


@dataclass(frozen=True)
class Weights:
    """The weights of the cost expression, in tokens (ADR 2)."""

    charged: float = 3.0
    displaced: float = 1.0
    request: float = 128.0
    fresh: float = 0.1
    """Added to `request`, as this share of the tokens that no cache has."""
    copy: float = 16.0
    min_slack: float = 8.0
    load_factor: float = 1.5


@dataclass(frozen=True)
class Variant:
    """What is tried out."""

    weights: Weights = field(default_factory=Weights)
    candidates: bool = False
    """Whether the router looks at candidates only, instead of all replicas."""
    slow: float = 1.0
    """Every second replica takes so many times as long."""
    speeds: bool = True
    """Whether the router knows."""


def costs(
    weights: Weights,
    loads: Sequence[Load],
    capacity_tokens: int,
    prompt_tokens: int,
    hits: int,
    speeds: Sequence[float] = (),
) -> list[float]:
    """Computes the same as coordinator/lua/lib/costs.lua, for replicas of one size. `speeds`: of the mean; empty if all
    are equally fast."""
    best = max(load.matched_tokens for load in loads)
    per_request = weights.request + weights.fresh * (prompt_tokens - best)
    of_prompt: dict[int, tuple[float, float]] = {}
    """What is charged, and the room that the copy takes, by the tokens that a replica lacks. Most lack the same."""
    found = []
    for load in loads:
        lacks = best - load.matched_tokens
        if lacks not in of_prompt:
            share = 1.0
            if hits > 0:
                share = max(1 / (1 + hits), min(1.0, weights.copy * lacks / capacity_tokens))
            charged = weights.charged * (prompt_tokens - best + lacks * share)
            of_prompt[lacks] = charged, lacks * share if best else prompt_tokens
        charged, copied = of_prompt[lacks]
        displaced = max(0.0, copied - capacity_tokens + occupied_tokens(load, capacity_tokens))
        found.append(load.backlog_tokens + charged + weights.displaced * displaced + per_request * load.active)
    anywhere = (weights.charged - 1) * (prompt_tokens - best)
    return (
        [(cost - anywhere) / speed + anywhere for cost, speed in zip(found, speeds, strict=True)] if speeds else found
    )


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """When no callback is ready, the time jumps to the next timer."""

    _now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@dataclass
class Outcome:
    """The results of a run."""

    ttft_s: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    """The requests of each replica."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    wall_s: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        answered = sum(self.requests)
        return {
            "p50 ms": percentile(self.ttft_s, 0.5) * 1000,
            "p95 ms": percentile(self.ttft_s, 0.95) * 1000,
            "req/s": answered / self.wall_s,
            "cached %": 100 * self.cached_tokens / self.prompt_tokens,
            "busiest /mean": max(self.requests) / mean(self.requests),
            "cv": pstdev(self.requests) / mean(self.requests),
        }


class Holders:
    """Which replicas hold each block, or will hold it because a prompt was placed there."""

    def __init__(self) -> None:
        self._of: defaultdict[int, set[int]] = defaultdict(set)

    def add(self, block: int, replica: int) -> None:
        self._of[block].add(replica)

    def discard(self, block: int, replica: int) -> None:
        holders = self._of[block]
        holders.discard(replica)
        if not holders:
            del self._of[block]

    def depths(self, hashes: Sequence[int]) -> list[tuple[int, set[int]]]:
        """How many leading blocks are held, and by which replicas. The deepest comes first, and each set is a part of
        the next. Depths that the same replicas hold are one.

        A replica that holds a block practically holds all blocks before it (gateway/simulator/cache.py).
        """
        found: list[tuple[int, set[int]]] = []
        for at, block in enumerate(hashes, start=1):
            holders = self._of.get(block)
            if holders is None:
                break
            if found and len(found[-1][1]) == len(holders):
                found.pop()
            found.append((at, holders))
        return found[::-1]


class WatchedCache(BlockCache):
    """A replica's cache that tells the router of every change."""

    def __init__(self, num_blocks: int, replica: int, router: Router) -> None:
        super().__init__(num_blocks)
        self._replica = replica
        self._router = router

    def store(self, blocks: Sequence[Block], hashes: Sequence[int]) -> None:
        super().store(blocks, hashes)
        self._router.stored(self._replica, hashes, self.num_cached)

    def _forget(self, block: Block) -> None:
        block_hash = block.hash
        super()._forget(block)
        assert block_hash is not None
        if block_hash not in self._cached:
            self._router.evicted(self._replica, block_hash, self.num_cached)


class Router:
    """What a router knows of all replicas, kept up to date with every change, and its choice."""

    def __init__(self, variant: Variant, capacity_tokens: int, replicas: int, rng: random.Random) -> None:
        self.loads = [Load() for _ in range(replicas)]
        rates = [1 / variant.slow if replica % 2 else 1.0 for replica in range(replicas)]
        self._speeds = [rate / mean(rates) for rate in rates] if variant.speeds and variant.slow != 1 else []
        self._variant, self._capacity_tokens, self._rng = variant, capacity_tokens, rng
        self._holders = Holders()
        self._claims: list[Counter[int]] = [Counter() for _ in self.loads]
        """How many placed prompts will bring each block to each replica."""
        self._cached: list[set[int]] = [set() for _ in self.loads]
        self._hits: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """Hits by block and replica, as each owner's record counts them."""
        self._active = 0
        self._candidates = Candidates(self.loads, capacity_tokens, rng)

    # -- what happens to replicas ------------------------------------------------------------------------------------

    def stored(self, replica: int, hashes: Iterable[int], num_cached: int) -> None:
        self._cached[replica].update(hashes)
        for block in hashes:
            self._holders.add(block, replica)
        self._owns(replica, num_cached)

    def evicted(self, replica: int, block: int, num_cached: int) -> None:
        self._cached[replica].discard(block)
        if block not in self._claims[replica]:
            self._holders.discard(block, replica)
        self._owns(replica, num_cached)

    def _owns(self, replica: int, num_cached: int) -> None:
        self.loads[replica].owned_tokens = num_cached * BLOCK_TOKENS
        self._candidates.changed(replica)

    def placed(self, replica: int, hashes: Sequence[int], uncached_tokens: int) -> None:
        self._count(replica, 1, uncached_tokens)
        self._claims[replica].update(hashes)
        for block in hashes:
            self._holders.add(block, replica)

    def prefilled(self, replica: int, hashes: Sequence[int], uncached_tokens: int) -> None:
        self._count(replica, 0, -uncached_tokens)
        claims, cached = self._claims[replica], self._cached[replica]
        for block in hashes:
            claims[block] -= 1
            if not claims[block]:
                del claims[block]
                if block not in cached:
                    self._holders.discard(block, replica)

    def finished(self, replica: int) -> None:
        self._count(replica, -1, 0)

    def _count(self, replica: int, active: int, backlog_tokens: int) -> None:
        self.loads[replica].active += active
        self.loads[replica].backlog_tokens += backlog_tokens
        self._active += active
        self._candidates.changed(replica)

    # -- the choice --------------------------------------------------------------------------------------------------

    def place(self, hashes: Sequence[int], prompt_tokens: int) -> tuple[int, int]:
        """The chosen replica, and the leading tokens that it holds."""
        depths = self._holders.depths(hashes)
        limit = self._guard_limit()
        seen: Sequence[int] = range(len(self.loads))
        if self._variant.candidates and len(seen) > LOOK_AT_ALL:
            new_tokens = prompt_tokens - (depths[0][0] * BLOCK_TOKENS if depths else 0)
            seen = self._candidates.found(depths, prompt_tokens, new_tokens, limit)
        loads = [self.loads[replica] for replica in seen]
        self._match(seen, depths)
        hits = 0
        if depths:
            best, deepest = depths[0]
            counted = self._hits[hashes[best - 1]]
            hits = max((counted[replica] for replica in counted if replica in deepest), default=0)
        speeds = [self._speeds[replica] for replica in seen] if self._speeds else []
        cost = costs(self._variant.weights, loads, self._capacity_tokens, prompt_tokens, hits, speeds)
        least_active = self._variant.weights.min_slack
        allowed = [
            at
            for at, load in enumerate(loads)
            if (load.active / speeds[at] if speeds and load.active >= least_active else load.active) < limit
        ] or range(len(loads))
        least = min(cost[at] for at in allowed)
        equal = [at for at in allowed if cost[at] == least]
        at = min(equal, key=lambda at: (occupied_tokens(loads[at], self._capacity_tokens), self._rng.random()))
        matched_tokens = loads[at].matched_tokens
        self._sample_hit(seen[at], hashes, matched_tokens // BLOCK_TOKENS)
        return seen[at], matched_tokens

    def _match(self, seen: Sequence[int], depths: Sequence[tuple[int, set[int]]]) -> None:
        """Sets how many leading tokens of the prompt each of these replicas holds."""
        for replica in seen:
            self.loads[replica].matched_tokens = 0
        for depth, holders in reversed(depths):
            for replica in holders if len(seen) == len(self.loads) else holders.intersection(seen):
                self.loads[replica].matched_tokens = depth * BLOCK_TOKENS

    def _guard_limit(self) -> float:
        """The load guard allows replicas with fewer requests than this."""
        weights = self._variant.weights
        return max(weights.min_slack, weights.load_factor * self._active / len(self.loads))

    def _sample_hit(self, replica: int, hashes: Sequence[int], matched: int) -> None:
        if 0 < matched < len(hashes) and self._rng.random() < 1 / _HIT_SAMPLE:
            self._hits[hashes[matched - 1]][replica] += _HIT_SAMPLE


class Trial:
    """One mix with one variant."""

    def __init__(self, mix: Mix, variant: Variant, seed: int) -> None:
        settings = SimSettings(
            num_gpu_blocks=mix.capacity_tokens // BLOCK_TOKENS,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_s_per_token=DECODE_S_PER_TOKEN,
            events=False,
        )
        self._reader = SimReplica(settings)
        """Reads prompts. All replicas read them alike."""
        self._router = Router(variant, mix.capacity_tokens, mix.replicas, random.Random(seed))
        slow = replace(
            settings,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S / variant.slow,
            decode_s_per_token=DECODE_S_PER_TOKEN * variant.slow,
        )
        kinds = [slow if replica % 2 else settings for replica in range(mix.replicas)]
        self._engines = [SimEngine(each, _ignore, _ignore) for each in kinds]
        for replica, engine in enumerate(self._engines):
            engine.cache = WatchedCache(settings.num_gpu_blocks, replica, self._router)
        self._mix = mix

    async def run(self, workload: Workload) -> Outcome:
        engines = [asyncio.ensure_future(engine.run()) for engine in self._engines]
        warm_up = [index for index, session in enumerate(workload.warm_up) for _ in session.turns]
        await self._ask(workload.warm_up, warm_up)
        outcome = await self._ask(workload.sessions, workload.order)
        for engine in engines:
            engine.cancel()
        return outcome

    async def _ask(self, sessions: Sequence[Session], order: Sequence[int]) -> Outcome:
        outcome = Outcome(requests=[0] * len(self._engines))
        turns, loop = Turns(sessions, order), asyncio.get_running_loop()
        started_s = loop.time()

        async def worker() -> None:
            while (turn := await turns.begin()) is not None:
                index, messages = turn
                body = {"model": MODEL, "messages": messages}
                await turns.end(index, await self._request(body, sessions[index].max_tokens, outcome))

        await asyncio.gather(*(worker() for _ in range(self._mix.concurrency)))
        outcome.wall_s = loop.time() - started_s
        return outcome

    async def _request(self, body: Body, max_tokens: int, outcome: Outcome) -> str:
        started_s = asyncio.get_running_loop().time()
        prompt = chat_prompt(self._reader, body, None)
        hasher = BlockHasher(prompt, BLOCK_TOKENS)
        hasher.extend(prompt.tokens)
        at, matched_tokens = self._router.place(hasher.hashes, prompt.num_tokens)
        uncached_tokens = max(0, prompt.num_tokens - matched_tokens)
        self._router.placed(at, hasher.hashes, uncached_tokens)
        await asyncio.sleep(_WAY_S)
        answers = plan(body, [prompt], [self._reader.token_limit(prompt, max_tokens, "max_tokens")])
        generation = Generation(self._engines[at], [prompt], answers, True, EventTag())
        generation.start()
        await generation.progress()
        self._router.prefilled(at, hasher.hashes, uncached_tokens)
        outcome.ttft_s.append(asyncio.get_running_loop().time() - started_s + _WAY_S)
        while not generation.finished:
            await generation.progress()
        self._router.finished(at)
        outcome.requests[at] += 1
        outcome.prompt_tokens += prompt.num_tokens
        outcome.cached_tokens += generation.usage().cached_tokens
        await asyncio.sleep(_WAY_S)
        return generation.sequences[0].answer.text


def _ignore(_seconds: float) -> None:
    pass


def run(mix: Mix, variant: Variant, seed: int) -> Outcome:
    """Runs the mix with this seed. The result is the same every time."""
    loop = VirtualTimeLoop()
    trial, workload = Trial(mix, variant, seed), mix.make(seed)
    gc.freeze()  # a large fleet has millions of blocks, and every full collection would look at all of them
    try:
        return loop.run_until_complete(trial.run(workload))
    finally:
        gc.unfreeze()
        loop.close()


def variant(text: str) -> Variant:
    """Reads `charged=2,copy=8`, `candidates=on` or `slow=4,speeds=off`. Raises ValueError for anything else."""
    given = dict(pair.partition("=")[::2] for pair in text.split(","))
    switches = {name: given.pop(name, default) for name, default in (("candidates", "off"), ("speeds", "on"))}
    for name, value in switches.items():
        if value not in ("on", "off"):
            raise ValueError(f"{text!r}: {name} is on or off")
    candidates, speeds = (value == "on" for value in switches.values())
    try:
        slow = float(given.pop("slow", 1))
        return Variant(Weights(**{name: float(value) for name, value in given.items()}), candidates, slow, speeds)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error


def _seeds(text: str) -> range:
    """An argparse type: `1-10`, or one seed."""
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found:
        raise argparse.ArgumentTypeError(f"the first and the last, as in 1-10, not {text!r}")
    return found


def _variant(text: str) -> tuple[str, Variant]:
    try:
        return text, variant(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class Fleet:
    """A mix on a fleet of some size, by name: processes cannot pass mixes to each other."""

    mix: str
    replicas: int = 0
    """0: as many as the mix has."""
    requests: int = 0
    """The most requests for each replica, if `replicas` is given."""

    def figures(self, tried: Variant, seed: int) -> dict[str, float]:
        mix = MIXES[self.mix]
        return run(mix.on(self.replicas, self.requests) if self.replicas else mix, tried, seed).figures


def _shown(fleet: Fleet, rows: dict[str, list[dict[str, float]]]) -> Table:
    figures = next(iter(rows.values()))
    size = f" on {fleet.replicas} replicas" if fleet.replicas else ""
    shown = tables.table(f"{fleet.mix}{size}: means of {len(figures)} seeds", ("weights",), list(figures[0]))
    for text, found in rows.items():
        shown.add_row(text, *(f"{mean(each[name] for each in found):.4g}" for name in figures[0]))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing.whatif",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(Weights.__dataclass_fields__)
    parser.add_argument(
        "variants",
        nargs="*",
        type=_variant,
        help=f"name=value, separated by commas; of: {known}, slow; or candidates=on",
    )
    parser.add_argument("--mixes", type=names(MIXES), default=",".join(MIXES), help="default: %(default)s")
    parser.add_argument("--seeds", type=_seeds, default="1-10", help="first and last (default: %(default)s)")
    parser.add_argument("--replicas", type=counts, default="", help="sizes of fleets (default: the mix's own)")
    parser.add_argument(
        "--requests", type=count, default="40", help="the most for each replica, with --replicas (default: %(default)s)"
    )
    parser.add_argument("--processes", type=count, default="2", help="at once (default: %(default)s)")
    options = parser.parse_args()
    fleets = [
        Fleet(name, replicas, options.requests if replicas else 0)
        for name in options.mixes
        for replicas in options.replicas or [0]
    ]
    variants = {"as it is": Variant()} | dict(options.variants)
    console = Console()
    with ProcessPoolExecutor(options.processes) as pool, console.status("") as status:
        for fleet in fleets:
            status.update(f"{fleet.mix} {fleet.replicas or ''}")
            asked = {
                text: [pool.submit(fleet.figures, tried, seed) for seed in options.seeds]
                for text, tried in variants.items()
            }
            console.print(_shown(fleet, {text: [each.result() for each in found] for text, found in asked.items()}))


if __name__ == "__main__":
    main()
