"""The settings of one simulated replica, which never change."""

from __future__ import annotations

import re
from dataclasses import dataclass

PD_ROLES = ("prefill", "decode")
_POSITIVE = ("chunk_tokens", "ttl_s", "value_bytes", "kv_bytes_per_token", "load_bytes_per_s", "redis_bytes_per_s")


@dataclass(frozen=True, slots=True)
class SimLmcacheSettings:
    """LMCache's server (0.5.6) beside a replica. Its rates were published by others:

    - from CPU memory to the GPU, 22.1 GiB/s: LMCache's log in KVGate's offload experiment (its report, 3)
    - from Redis, 0.278 GB/s: redis-py, which LMCache's redis:// uses ("Throughput-optimizing Redis for L2 KV Cache
      Reuse", redis.io); LMCache's documentation has 1.5 for its native client and Redis 6.0. Storing there is assumed
      to take as long.

    Storing in CPU memory takes no time.
    """

    cpu_gb: float = 0.0
    """CPU memory for chunks, in 10^9 bytes; 0 means none."""
    redis_url: str | None = None
    """The Redis that chunks are stored in."""
    chunk_tokens: int = 256
    key_prefix: str = "kvchunk"
    ttl_s: int = 86_400
    value_bytes: int = 64
    """The bytes that are really written for a chunk. The size of its KV only affects the simulated times."""
    kv_bytes_per_token: int = 57_344
    """2 x 28 layers x 4 KV heads x 128 x 2 bytes: Qwen2-7B, which LLaVA-OneVision-7B builds on."""

    load_bytes_per_s: float = 22.1 * 2**30
    redis_bytes_per_s: float = 0.278e9

    def __post_init__(self) -> None:
        if not (self.cpu_gb > 0 or self.redis_url):
            raise ValueError("lmcache needs CPU memory or a Redis to keep chunks in")
        for name in _POSITIVE:
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"lmcache.{name} must be positive, got {value}")

    @property
    def chunk_kv_bytes(self) -> int:
        return self.chunk_tokens * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One replica. The rates are rough figures for a 7-8B vision-language model on an A40-like card."""

    id: str = "r0"
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port; `ready` is called with it."""

    model: str = "kvgate/sim-vlm"
    served_names: tuple[str, ...] = ("sim",)
    adapters: tuple[str, ...] = ()
    """LoRA adapters: served under their own names, with the first served name as `parent`."""

    block_size: int = 16
    num_gpu_blocks: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    data_parallel: int = 1
    """Engines in this replica, each with a cache of its own; X-data-parallel-rank picks one, counted from 0."""
    data_parallel_start_rank: int = 0
    """The rank of the first engine. Servers that are started for each rank, or for each node, have different ones."""
    rust_frontend: bool = False
    """Whether it behaves like vLLM's front end in Rust: X-data-parallel-rank counts the ranks of the whole deployment,
    and metrics lack the start time, the cache's size and sleep."""

    prefill_tokens_per_s: float = 10_000.0
    decode_s_per_token: float = 0.02
    """The time of one decode step, whatever the batch."""
    speed: float = 1.0
    """Every simulated time is divided by it; 0 means no delays at all."""

    vllm_version: str = "0.32.0"
    """The version that it says it is. It decides whether KV events name sessions and whether it tells their sources."""
    attention: tuple[str, ...] = ("full_attention",)
    """The kinds of its groups of KV blocks, in vLLM's words. Events name the blocks of each group. A block is evicted
    from all groups at once."""
    events: bool = True
    """Publish KV events."""
    events_port: int = 0
    """The port of the first rank's publisher; other ranks follow. 0 takes a free port for each."""
    replay_port: int = 0
    """The same for the replay sockets."""
    replay_steps: int = 10_000
    """Batches kept for replays (vLLM's buffer_steps); 0 means no replay socket."""
    cpu_blocks: int = 0
    """Blocks of each engine's CPU tier (vLLM's own); 0 means no offloading."""
    lmcache: SimLmcacheSettings | None = None
    """LMCache, instead of a CPU tier."""
    nixl: bool = False
    """Whether it hands KV blocks over to other servers, and takes theirs (NixlConnector)."""
    mooncake: bool = False
    """The same by vLLM's MooncakeConnector."""
    recomputes: bool = False
    """Whether it computes a prompt whose blocks it cannot take (`kv_load_failure_policy: recompute`)."""

    pd_role: str = ""
    """The role that it begins with, if it can change that (vLLM's `pd_role`): prefill or decode; "" if it cannot."""

    @property
    def transfer_s_per_token(self) -> float:
        """Of KV blocks of another server: 57 kB a token, as in SimLmcacheSettings, over 50 Gbit/s."""
        return 9.2e-6 / self.speed if self.speed > 0 else 0.0

    @property
    def ranks(self) -> range:
        return range(self.data_parallel_start_rank, self.data_parallel_start_rank + self.data_parallel)

    def __post_init__(self) -> None:
        assert self.version
        if self.pd_role and (not self.nixl or self.pd_role not in PD_ROLES):
            raise ValueError(f"pd_role is one of {', '.join(PD_ROLES)}, and needs nixl")
        if self.lmcache is not None and self.cpu_blocks:
            raise ValueError("cpu_blocks and lmcache are two answers to one question; leave one out")
        if self.nixl and self.mooncake:
            raise ValueError("nixl and mooncake are two answers to one question; leave one out")
        if self.lmcache is not None and self.lmcache.chunk_tokens % self.block_size:
            raise ValueError(
                f"lmcache.chunk_tokens must be a multiple of block_size ({self.block_size}), "
                f"got {self.lmcache.chunk_tokens}"
            )

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of `vllm_version`."""
        found = re.match(r"(\d+)\.(\d+)", self.vllm_version)
        if found is None:
            raise ValueError(f"vllm_version must begin with two numbers, like 0.32.0, got {self.vllm_version!r}")
        return int(found[1]), int(found[2])

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens: what one engine's cache can hold."""
        return self.num_gpu_blocks * self.block_size
