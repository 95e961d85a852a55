"""What one simulated replica is; built once by its caller and never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One replica. The rates are rough figures for a 7-8B vision-language model on an A40-like card."""

    id: str = "r0"
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port; `ready` is told which."""

    model: str = "kvgate/sim-vlm"
    root: str | None = None
    """/v1/models `root` of the base model; None means `model`."""
    served_names: tuple[str, ...] = ("sim",)
    adapters: tuple[str, ...] = ()
    """LoRA adapters: served under their own names, with the first served name as `parent`."""

    block_size: int = 16
    num_gpu_blocks: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    data_parallel: int = 1
    """Engines in this replica, each with a cache of its own; X-data-parallel-rank picks one."""

    prefill_tokens_per_s: float = 10_000.0
    decode_s_per_token: float = 0.02
    """The time of one decode step, whatever the batch."""
    speed: float = 1.0
    """Every simulated time is divided by it; 0 means no delays at all."""

    vllm_version: str = "0.32.0"
    """The version it says it is; decides what KV events look like (bench/simulator/events.py)."""
    events: bool = True
    """Publish KV events."""
    events_port: int = 0
    """Of the first rank's publisher, the others' follow; 0 takes a free one for each."""
    replay_port: int = 0
    """Likewise, of the replay sockets."""
    replay_steps: int = 10_000
    """Batches kept for replays (vLLM's buffer_steps); 0 means no replay socket."""
    cpu_blocks: int = 0
    """Blocks of each engine's CPU tier; 0 means no offloading."""

    keep_alive_s: float = 5.0
    """Idle connections are closed after it, as by vLLM's uvicorn."""
    prompt_tokens_details: bool = True
    """Report `usage.prompt_tokens_details.cached_tokens` where not 0
    (vLLM's --enable-prompt-tokens-details)."""

    def __post_init__(self) -> None:
        positive = {
            "block_size": self.block_size,
            "num_gpu_blocks": self.num_gpu_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "data_parallel": self.data_parallel,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "keep_alive_s": self.keep_alive_s,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name, value in {"replay_steps": self.replay_steps, "cpu_blocks": self.cpu_blocks}.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if _VERSION.match(self.vllm_version) is None:
            raise ValueError(f"vllm_version must begin with two numbers, like 0.32.0, got {self.vllm_version!r}")
        if self.speed < 0 or self.decode_s_per_token < 0:
            raise ValueError("speed and decode_s_per_token must not be negative")
        if not self.served_names:
            raise ValueError("served_names must name the model at least once")

    @property
    def model_root(self) -> str:
        return self.root or self.model

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of `vllm_version`."""
        found = _VERSION.match(self.vllm_version)
        assert found is not None
        return int(found[1]), int(found[2])

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens: what one engine's cache can hold."""
        return self.num_gpu_blocks * self.block_size
