"""Tries out cost expressions: runs the mixes on simulated engines in virtual time, in seconds instead of hours.

There is no HTTP, no Redis and no clock. The router knows every cache, as if each event were applied at once. A request
takes a millisecond to its replica and one back. Check a good result with `python -m bench.routing`, which runs the
real system.

    python -m bench.routing.whatif --mixes chat,vqa --seeds 1-10 charged=2 charged=3,copy=8 request=0

Each argument is a variant of the weights of coordinator/lua/lib/choose.lua. The first line shows the unchanged
expression.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from rich.console import Console
from rich.table import Table

from bench import tables
from bench.load import BLOCK_TOKENS, MODEL, Body, Turns, percentile
from bench.options import names
from bench.routing.fleets import DECODE_S_PER_TOKEN, PREFILL_TOKENS_PER_S
from bench.routing.mixes import MIXES, Mix, Workload
from bench.workloads import Session
from gateway.simulator.generation import Generation
from gateway.simulator.openai_api import chat_prompt
from gateway.simulator.planning import plan
from gateway.simulator.prompt import BlockHasher
from gateway.simulator.replica import SimReplica
from gateway.simulator.sequence import EventTag
from gateway.simulator.settings import SimSettings

_WAY_S = 0.001
_HIT_SAMPLE = 8
_FULL = 0.96


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


@dataclass
class Load:
    """The load of one replica when a prompt is placed."""

    active: int = 0
    backlog_tokens: int = 0
    owned_tokens: int = 0
    matched_tokens: int = 0


def costs(weights: Weights, loads: Sequence[Load], capacity_tokens: int, prompt_tokens: int, hits: int) -> list[float]:
    """Computes the same as coordinator/lua/lib/choose.lua, for replicas of one size."""
    best = max(load.matched_tokens for load in loads)
    found = []
    for load in loads:
        lacks = best - load.matched_tokens
        share = 1.0
        if hits > 0:
            share = max(1 / (1 + hits), min(1.0, weights.copy * lacks / capacity_tokens))
        copied = lacks * share if best else prompt_tokens
        room = capacity_tokens - _occupied(load, capacity_tokens)
        found.append(
            load.backlog_tokens
            + weights.charged * (prompt_tokens - best + lacks * share)
            + weights.displaced * max(0.0, copied - room)
            + (weights.request + weights.fresh * (prompt_tokens - best)) * load.active
        )
    return found


def _occupied(load: Load, capacity_tokens: int) -> int:
    return capacity_tokens if load.owned_tokens > _FULL * capacity_tokens else load.owned_tokens


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
            "cached": self.cached_tokens / self.prompt_tokens,
            "busiest": max(self.requests) / answered,
        }


class Trial:
    """One mix with one variant of the expression."""

    def __init__(self, mix: Mix, weights: Weights, seed: int) -> None:
        settings = SimSettings(
            num_gpu_blocks=mix.capacity_tokens // BLOCK_TOKENS,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_s_per_token=DECODE_S_PER_TOKEN,
            events=False,
        )
        self._replicas = [SimReplica(replace(settings, id=f"r{n}")) for n in range(mix.replicas)]
        self._engines = [replica.engines[0] for replica in self._replicas]
        self._mix, self._weights, self._rng = mix, weights, random.Random(seed)
        self._loads = [Load() for _ in self._engines]
        self._coming: list[list[list[int]]] = [[] for _ in self._engines]
        """The blocks of the requests on their way to each replica. They are claimed at placement."""
        self._hits: dict[tuple[int, int], int] = defaultdict(int)
        """Hits by replica and block, as each owner's record counts them."""

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
        prompt = chat_prompt(self._replicas[0], body, None)
        hasher = BlockHasher(prompt, BLOCK_TOKENS)
        hasher.extend(prompt.tokens)
        at = self._place(hasher.hashes, prompt.num_tokens)
        load = self._loads[at]
        uncached = max(0, prompt.num_tokens - load.matched_tokens)
        load.active += 1
        load.backlog_tokens += uncached
        self._coming[at].append(hasher.hashes)
        await asyncio.sleep(_WAY_S)
        self._coming[at].remove(hasher.hashes)
        limit = self._replicas[at].token_limit(prompt, max_tokens, "max_tokens")
        answers = plan(body, [prompt], [limit])
        generation = self._replicas[at].generation([prompt], answers, {}, True, EventTag())
        generation.start()
        await generation.progress()
        load.backlog_tokens -= uncached
        outcome.ttft_s.append(asyncio.get_running_loop().time() - started_s + _WAY_S)
        said = await self._rest(generation)
        load.active -= 1
        outcome.requests[at] += 1
        outcome.prompt_tokens += prompt.num_tokens
        outcome.cached_tokens += generation.usage().cached_tokens
        await asyncio.sleep(_WAY_S)
        return said

    async def _rest(self, generation: Generation) -> str:
        while not generation.finished:
            await generation.progress()
        return generation.sequences[0].answer.text

    def _place(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        for load, engine, coming in zip(self._loads, self._engines, self._coming, strict=True):
            claimed = {each for blocks in coming for each in blocks}
            load.matched_tokens = engine.foresee(hashes, claimed) * BLOCK_TOKENS
            load.owned_tokens = engine.cache.num_cached * BLOCK_TOKENS
        matched = [load.matched_tokens // BLOCK_TOKENS for load in self._loads]
        best, capacity = max(matched), self._mix.capacity_tokens
        deepest = [n for n, blocks in enumerate(matched) if blocks == best > 0]
        hits = max((self._hits[n, hashes[best - 1]] for n in deepest), default=0)
        cost = costs(self._weights, self._loads, capacity, prompt_tokens, hits)
        at = min(self._allowed(), key=lambda n: (cost[n], _occupied(self._loads[n], capacity), self._rng.random()))
        if 0 < matched[at] < len(hashes) and self._rng.random() < 1 / _HIT_SAMPLE:
            self._hits[at, hashes[matched[at] - 1]] += _HIT_SAMPLE
        return at

    def _allowed(self) -> list[int]:
        """The replicas that the load guard allows."""
        active = [load.active for load in self._loads]
        limit = max(self._weights.min_slack, self._weights.load_factor * mean(active))
        return [n for n, count in enumerate(active) if count < limit] or list(range(len(active)))


def run(mix: Mix, weights: Weights, seed: int) -> Outcome:
    """Runs the mix with this seed. The result is the same every time."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(Trial(mix, weights, seed).run(mix.make(seed)))
    finally:
        loop.close()


def variant(text: str) -> Weights:
    """Reads `charged=2,copy=8`. Raises ValueError for an unknown weight."""
    try:
        return replace(
            Weights(), **{name: float(value) for name, _, value in (p.partition("=") for p in text.split(","))}
        )
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


def _variant(text: str) -> tuple[str, Weights]:
    try:
        return text, variant(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _shown(
    mix: Mix, variants: Sequence[tuple[str, Weights]], seeds: Sequence[int], tell: Callable[[str], object]
) -> Table:
    rows = {}
    for text, weights in (("as it is", Weights()), *variants):
        tell(f"{mix.name}: {text}")
        rows[text] = [run(mix, weights, seed).figures for seed in seeds]
    columns = list(rows["as it is"][0])
    shown = tables.table(f"{mix.name}: means of {len(seeds)} seeds", ("weights",), columns)
    for text, figures in rows.items():
        shown.add_row(text, *(f"{mean(each[name] for each in figures):.4g}" for name in columns))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing.whatif",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    weights = ", ".join(Weights.__dataclass_fields__)
    parser.add_argument("variants", nargs="*", type=_variant, help=f"name=value, separated by commas; of: {weights}")
    parser.add_argument("--mixes", type=names(MIXES), default=",".join(MIXES), help="default: %(default)s")
    parser.add_argument("--seeds", type=_seeds, default="1-10", help="first and last (default: %(default)s)")
    options = parser.parse_args()
    console = Console()
    for name in options.mixes:
        with console.status("") as status:
            table = _shown(MIXES[name], options.variants, options.seeds, status.update)
        console.print(table)


if __name__ == "__main__":
    main()
