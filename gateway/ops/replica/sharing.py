"""Chunk sizes and timeouts for a Redis that a replica's LMCache shares with KVGate.

**Chunk size.** Redis serves one command at a time, so a placement waits while a chunk is read. A chunk of 1 to 4 MiB is
large enough to be worth its round trip, and small enough to wait for.

**Timeout.** LMCache's adapter requests each chunk of a prompt separately, with `num_workers` threads, and has no
circuit breaker. If Redis accepts connections and never answers, each of ceil(chunks / num_workers) rounds takes the
whole request timeout before the request is computed. The threads may first have to finish as many rounds of stores of
the request before. So the timeout is chosen such that twice the rounds of the longest prompt fit in `max_stall_s`. This
holds for requests one after the other. The waits of concurrent requests add up, and more workers make them shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.settings.config_file import SettingsError

MIB = 2**20
SMALLEST_CHUNK_BYTES = 1 * MIB
LARGEST_CHUNK_BYTES = 4 * MIB
USUAL_CHUNK_TOKENS = 256
"""LMCache's own default. Prompts share whole chunks only, so a chunk is no larger than necessary."""

WORKERS = (8, 16, 32, 64, 128)
# A chunk of 4 MiB that waits for 31 others takes about 65 ms (measured at 2 GB/s).
_COMFORTABLE_TIMEOUT_S = 0.1
_SHORTEST_TIMEOUT_S = 0.05
_LONGEST_TIMEOUT_S = 0.3


@dataclass(frozen=True)
class Pace:
    """How many requests LMCache's adapter sends to Redis at once, and how long it waits for each."""

    num_workers: int
    request_timeout_s: float


def chunk_tokens(kv_bytes_per_token: int, block_size: int) -> int:
    """The tokens of a chunk: whole blocks of 1 to 4 MiB together, close to the usual number. Raises SettingsError."""
    block_bytes = kv_bytes_per_token * block_size
    most_blocks = LARGEST_CHUNK_BYTES // block_bytes
    if not most_blocks:
        problem = (
            f"one block of {block_size} tokens takes {block_bytes / MIB:.1f} MiB on a GPU, and a chunk in Redis should "
            "be at most 4 MiB; use more GPUs (tensor_parallel_size), kv_cache_dtype: fp8 or a smaller block_size"
        )
        raise SettingsError([f"lmcache.chunk_tokens: {problem}"])
    enough_blocks = math.ceil(SMALLEST_CHUNK_BYTES / block_bytes)
    usual_blocks = max(1, USUAL_CHUNK_TOKENS // block_size)
    return min(most_blocks, max(enough_blocks, usual_blocks)) * block_size


def usual_chunk_tokens(block_size: int) -> int:
    """The tokens of a chunk outside of Redis: whole blocks, close to the usual number."""
    return max(1, USUAL_CHUNK_TOKENS // block_size) * block_size


def check_chunk(tokens: int, kv_bytes_per_token: int, block_size: int) -> None:
    """Raises SettingsError if a chunk of this many tokens should not be in Redis."""
    size = tokens * kv_bytes_per_token
    if not SMALLEST_CHUNK_BYTES <= size <= LARGEST_CHUNK_BYTES:
        fix = f"leave it out to get {chunk_tokens(kv_bytes_per_token, block_size)}"
        what = f"is {tokens}: {size / MIB:.2f} MiB; a chunk in Redis must have 1 to 4 MiB; {fix}"
        raise SettingsError([f"lmcache.chunk_tokens: {what}"])


def chunks_of(max_model_len: int, tokens: int, tensor_parallel_size: int) -> int:
    """The number of chunks of the longest prompt. Each GPU has its own chunks."""
    return max(1, max_model_len // tokens) * tensor_parallel_size


def pace(chunks: int, max_stall_s: float) -> Pace:
    """The pace at which a Redis that does not answer delays a prompt of this many chunks by `max_stall_s` at most.

    It has the fewest workers that allow a comfortable timeout. Raises SettingsError.
    """
    found = [Pace(workers, _timeout_s(chunks, max_stall_s, workers)) for workers in WORKERS]
    comfortable = (each for each in found if each.request_timeout_s >= _COMFORTABLE_TIMEOUT_S)
    best = next(comfortable, found[-1])
    if best.request_timeout_s < _SHORTEST_TIMEOUT_S:
        rounds = 2 * math.ceil(chunks / best.num_workers)
        problem = (
            f"the longest prompt has {chunks} chunks; with {best.num_workers} workers and the shortest timeout that "
            f"Redis can keep ({_SHORTEST_TIMEOUT_S} s), one that does not answer would hold it up for "
            f"{rounds * _SHORTEST_TIMEOUT_S:.1f} s: raise max_stall_s to that, or lower vllm.max_model_len"
        )
        raise SettingsError([f"lmcache.redis.max_stall_s: {problem}"])
    return best


def _timeout_s(chunks: int, max_stall_s: float, workers: int) -> float:
    """The request timeout, rounded to milliseconds for the adapter."""
    fitting_s = max_stall_s / (2 * math.ceil(chunks / workers))
    return min(_LONGEST_TIMEOUT_S, math.floor(fitting_s * 1000) / 1000)
