"""Published results of others in these scenarios. This project measured none of them.

KVGate: "Where does the offloaded KV live?", kvgate.vercel.app, and docs/BENCHMARK_REPORT.md, section 3, of
rishika7006/kvgate: LLaVA-OneVision-7B on an A40, vLLM 0.11.0 in eager mode with 2 560 blocks, LMCache 0.3.7 in process.

GPUStack: "Evaluating LMCache Prefill Acceleration in vLLM", GPUStack's performance lab: Qwen3-8B on an RTX 4090, vLLM
0.10.1.1, LMCache in process with 50 GB of CPU memory. Requests/s are its output tokens/s over 128 tokens an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

KVGATE, GPUSTACK = "KVGate", "GPUStack"


@dataclass(frozen=True)
class Figure:
    """A row of a published table. None stands for a figure that the table does not have."""

    scenario: str
    tier: str
    chunk_tokens: int | None
    by: str
    variant: str = ""
    """The variant of the scenario, if the table has several."""
    mean_ms: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    stored_gb: float | None = None


PUBLISHED = (
    Figure("revisits", "gpu", None, KVGATE, p50_ms=1393, p95_ms=2583, per_s=1.11),
    Figure("revisits", "cpu", 256, KVGATE, p50_ms=249, p95_ms=412, per_s=2.33, stored_gb=35),
    Figure("revisits", "redis", 256, KVGATE, p50_ms=1424, p95_ms=2686, per_s=1.08, stored_gb=4.7),
    Figure("multi-turn", "gpu", None, GPUSTACK, "5K", 4350.48, prompt_tokens_per_s=5849),
    Figure("multi-turn", "cpu", 256, GPUSTACK, "5K", 2646.09, prompt_tokens_per_s=9426),
    Figure("multi-turn", "gpu", None, GPUSTACK, "20K", 5070.52, prompt_tokens_per_s=4312.17),
    Figure("multi-turn", "cpu", 256, GPUSTACK, "20K", 2091.00, prompt_tokens_per_s=7750.60),
    Figure("multi-turn", "gpu", None, GPUSTACK, "20K, answers of 1 token", 4658.66, prompt_tokens_per_s=7443.2),
    Figure("multi-turn", "cpu", 64, GPUSTACK, "20K, answers of 1 token", 985.28, prompt_tokens_per_s=33_820.3),
    Figure("multi-turn", "cpu", 256, GPUSTACK, "20K, answers of 1 token", 980.87, prompt_tokens_per_s=33_887.9),
    Figure("multi-turn", "cpu", 1024, GPUSTACK, "20K, answers of 1 token", 1055.69, prompt_tokens_per_s=31_634.0),
    Figure("random", "gpu", None, GPUSTACK, "1K", 8886.36, per_s=579.86 / 128),
    Figure("random", "cpu", 256, GPUSTACK, "1K", 9242.72, per_s=561.44 / 128),
    Figure("random", "gpu", None, GPUSTACK, "8K", 80_610.70, per_s=77.87 / 128),
    Figure("random", "cpu", 256, GPUSTACK, "8K", 92_682.22, per_s=66.77 / 128),
    Figure("all-hit", "gpu", None, GPUSTACK, "1K", 3052.08, per_s=5954.33 / 128),
    Figure("all-hit", "cpu", 256, GPUSTACK, "1K", 3247.10, per_s=5752.71 / 128),
)
