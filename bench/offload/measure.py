"""One run of a scenario on a replica with a tier."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from bench import scaled_time
from bench.load import percentile, pinned_spread, run
from bench.machine import IdleShare
from bench.offload.scenarios import Scenario
from bench.offload.stages import Stage, Tier


@dataclass(frozen=True)
class Row:
    """The results of a run. If the engine's times are scaled, all times are converted back."""

    engine: str
    scenario: str
    tier: str
    chunk_tokens: int | None
    seed: int
    requests: int
    failed: int
    """Failed requests, including those before the measurement."""
    ttft_ms: list[float]
    per_s: float
    prompt_tokens_per_s: float
    gpu_share: float
    """The share of prompt tokens in the GPU's cache."""
    loaded_share: float
    """The share of prompt tokens that were loaded from the tier."""
    cpu_bytes: int
    """KV in CPU memory at the end."""
    redis_bytes: int
    """KV in Redis at the end."""
    fetched_bytes: int
    """Bytes read from Redis during the run."""
    idle: float
    valid: bool

    @property
    def mean_ms(self) -> float:
        return fmean(self.ttft_ms)

    @property
    def stored_gb(self) -> float:
        return (self.cpu_bytes + self.redis_bytes) / 1e9

    def percentile_ms(self, share: float) -> float:
        return percentile(self.ttft_ms, share)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def measure(stage: Stage, scenario: Scenario, tier: Tier, seed: int) -> Row:
    workload = scenario.make(seed, stage.sizes)
    spread = pinned_spread([stage.url])
    warmed_up = await run(workload.warm_up, spread, scenario.concurrency, None, stage.model)
    before, counted, idle = await stage.tallies(), stage.counters(), IdleShare()
    result = await run(workload.sessions, spread, scenario.concurrency, workload.order, stage.model, stage.block_tokens)
    idle_share, after = idle(), await stage.tallies()
    found = {name: value - counted[name] for name, value in stage.counters().items()}
    looked_up = max(1.0, found["looked up"])
    return Row(
        engine=stage.engine,
        scenario=scenario.name,
        tier=tier.name,
        chunk_tokens=tier.chunk_tokens,
        seed=seed,
        requests=result.requests,
        failed=result.failed + warmed_up.failed,
        ttft_ms=scaled_time.ttft_ms(result, stage.speed),
        per_s=scaled_time.per_s(result, stage.speed),
        prompt_tokens_per_s=round(result.prompt_tokens / result.wall_s / stage.speed, 1),
        gpu_share=round(found["found"] / looked_up, 5),
        loaded_share=round(found["loaded"] / looked_up, 5),
        cpu_bytes=after.cpu_bytes,
        redis_bytes=after.redis_bytes,
        fetched_bytes=after.fetched_bytes - before.fetched_bytes,
        idle=round(idle_share, 3),
        valid=scaled_time.is_valid(result, stage.speed, idle_share),
    )
