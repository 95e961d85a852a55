"""What vLLM's own offload to CPU memory brings behind KVGate, beside the table that llm-d published.

    python -m bench.tiers [--scenarios high,low] [--max-active-requests 6] [--out FILE]

The table is that of llm-d's guide "tiered prefix cache" (guides/tiered-prefix-cache/cpu/README.md of llm-d/llm-d):
Qwen3-32B on 8 replicas of two H100 each; 45 requests at once, of 45 groups of 10 prompts with one system prompt each.
Here, simulated replicas have the same numbers of blocks, and KVGate routes. Caches are empty at first, and prompts come
in random order.

The engines' rates come from one row of that table: low cache, no CPU tier. A block that is loaded costs a tenth of its
prefill (gateway/simulator/engine.py): here 23 GB/s of this model's KV. Writing to the CPU tier costs nothing there.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import record, scaled_time, tables
from bench.cluster import running_gateways, running_replicas
from bench.load import BLOCK_TOKENS, MODEL, percentile, random_spread, run
from bench.machine import IdleShare
from bench.options import count, names, positive
from bench.routing.fleets import Fleet, cache_share
from bench.routing.mixes import BYTES_PER_TOKEN
from bench.workloads import Session, one_turn, text, user, words

PROMPTS_EACH, QUESTION_TOKENS = 10, 256
_CONFIG: dict[str, Any] = {"redis": {"budget_ms": 200}}  # as in bench.routing: all share the processors


@dataclass(frozen=True)
class Published:
    mean_ttft_s: float
    p90_ttft_s: float
    tokens_per_s: float
    """Of prompts and answers."""


@dataclass(frozen=True)
class Scenario:
    """The requests, and the fleet. The defaults are the guide's."""

    name: str
    prefix_tokens: int
    without_tier: Published
    with_tier: Published
    groups: int = 45
    clients: int = 45
    answer_tokens: int = 1024
    replicas: int = 8
    gpu_blocks: int = 9271
    cpu_blocks: int = 41_000


HIGH = Scenario("high cache", 30_000, Published(9.0, 20.9, 38_534.8), Published(6.7, 15.9, 46_662.5))
LOW = Scenario("low cache", 8000, Published(0.12, 0.09, 23_389.6), Published(0.13, 0.11, 23_032.6))

SCENARIOS = {"high": HIGH, "low": LOW}

_LOW_MEAN_S = 18.4
"""LOW without the tier: the published mean time to the end of an answer."""
DECODE_S_PER_TOKEN = (_LOW_MEAN_S - LOW.without_tier.mean_ttft_s) / LOW.answer_tokens
PREFILL_TOKENS_PER_S = (LOW.prefix_tokens / PROMPTS_EACH + QUESTION_TOKENS) / LOW.without_tier.mean_ttft_s
"""As if the mean first token took as long as what a prompt lacks on average: the system prompt once in ten, and the
question. Real engines also take time for other things, so they compute faster than this."""


@dataclass(frozen=True)
class Row:
    """One run. Times are the engines' own, with the gateways' in them."""

    scenario: str
    has_tier: bool
    requests: int
    failed: int
    mean_ttft_s: float
    p90_ttft_s: float
    tokens_per_s: float
    from_gpu: float
    """The share of the prompts' tokens that were found there."""
    from_cpu: float
    idle: float
    valid: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sessions(scenario: Scenario, seed: int) -> list[Session]:
    """All requests, in random order."""
    rng = random.Random(f"tiers {scenario.name} {seed}")
    made = []
    for group in range(scenario.groups):
        system = {"role": "system", "content": text(rng, scenario.prefix_tokens * BYTES_PER_TOKEN)}
        for _ in range(PROMPTS_EACH):
            question = user(words(text(rng, QUESTION_TOKENS * BYTES_PER_TOKEN)))
            made.append(one_turn(group, system, question, max_tokens=scenario.answer_tokens))
    rng.shuffle(made)
    return made


def measured(
    scenario: Scenario, has_tier: bool, gateways: int, speed: float, seed: int, max_active_requests: int | None = None
) -> Row:
    """Runs the scenario on new replicas."""
    config = _CONFIG | {"policy": {"max_active_requests": max_active_requests}}
    arguments = {
        "--speed": speed,
        "--num-gpu-blocks": scenario.gpu_blocks,
        "--cpu-blocks": scenario.cpu_blocks if has_tier else 0,
        "--prefill-tokens-per-s": PREFILL_TOKENS_PER_S,
        "--decode-s-per-token": DECODE_S_PER_TOKEN,
    }
    flat = tuple(str(part) for pair in arguments.items() for part in pair)
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        running_replicas(Path(folder), scenario.replicas, flat) as replicas,
    ):
        fleet = Fleet("simulated", {each.id: each.url for each in replicas}, MODEL, BLOCK_TOKENS, speed)
        with running_gateways(fleet.urls, gateways=gateways, config=config) as cluster:
            idle, spread = IdleShare(), random_spread(cluster.gateway_urls, seed)
            result = asyncio.run(run(sessions(scenario, seed), spread, scenario.clients))
            idle_share = idle()
        from_gpu = cache_share(fleet.counters())
    ttft_s = [each / 1000 for each in scaled_time.ttft_ms(result, speed)]
    tokens = result.prompt_tokens + result.requests * scenario.answer_tokens
    return Row(
        scenario=scenario.name,
        has_tier=has_tier,
        requests=result.requests,
        failed=result.failed,
        mean_ttft_s=round(mean(ttft_s or [0.0]), 3),
        p90_ttft_s=round(percentile(ttft_s, 0.9), 3),
        tokens_per_s=round(tokens / result.wall_s / speed, 1),
        from_gpu=round(from_gpu, 4),
        from_cpu=round(result.cache_share - from_gpu, 4),
        idle=round(idle_share, 3),
        valid=scaled_time.is_valid(result, speed, idle_share),
    )


def _table(rows: list[Row]) -> Table:
    figures = ["mean s", "P90 s", "tokens/s"]
    shown = tables.table(
        "TTFT and throughput: published | simulated",
        ("cache", "tier"),
        [*figures, *figures, "from GPU", "from CPU", "idle"],
    )
    for row in rows:
        scenario = next(each for each in SCENARIOS.values() if each.name == row.scenario)
        there = scenario.with_tier if row.has_tier else scenario.without_tier
        shown.add_row(
            row.scenario.split()[0] if row.valid else f"{row.scenario} {scaled_time.INVALID}",
            "yes" if row.has_tier else "no",
            *(
                cell
                for each in (there, row)
                for cell in (f"{each.mean_ttft_s:.2f}", f"{each.p90_ttft_s:.2f}", f"{each.tokens_per_s:.0f}")
            ),
            *(f"{share:.1%}" for share in (row.from_gpu, row.from_cpu, row.idle)),
        )
    return shown


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=names(SCENARIOS), default="high,low", help="default: %(default)s")
    parser.add_argument(
        "--max-active-requests", type=count, help="the gateways' policy.max_active_requests (default: theirs)"
    )
    parser.add_argument("--gateways", type=count, default="2", help="default: %(default)s")
    parser.add_argument(
        "--speed",
        type=positive,
        default=1.5,
        help="divides the engines' times; above 1, engines tell how long prefills were meant to take, not how long "
        "this machine took, so equal ones seem equally fast (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=11, help="of the requests (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    found = record.Found[Row]({"kvgate": metadata.version("kvgate")}, options.out, Console())
    asked = options.gateways, options.speed, options.seed, options.max_active_requests
    for name in options.scenarios:
        for has_tier in (False, True):
            row = measured(SCENARIOS[name], has_tier, *asked)
            found.rows.append(row)
            found.console.print(row)
            found.save()
    found.console.print(_table(found.rows))


if __name__ == "__main__":
    main()
