"""Parses what an LMCache server tells over HTTP: how it keeps chunks in Redis, and how fast it loads them. Pure.

Sources, of LMCache 0.5.6: /status (v1/multiprocess/http_apis/info_api.py), /config (config_api.py), and /metrics, which
has the histograms `lmcache_mp.l2_load_throughput` and `lmcache_mp.l0_l1_load_throughput` (v1/mp_observability).
"""

from __future__ import annotations

import re
from typing import Any

from coordinator.lmcache_chunks import ChunkTier

_HASH = "blake3"
_CONTEXTS = ("cache_context_meta", "non_cuda_context_meta")
_DAY_S = 86_400
_GB = 1e9
_THROUGHPUT = re.compile(
    r"^lmcache_mp_(?P<what>l2|l0_l1)_load_throughput_GB_per_second_(?P<part>sum|count)(?:\{[^}]*\})? (?P<value>\S+)",
    re.MULTILINE,
)
_FIGURES = {"l2": "l2_load_bytes_per_s", "l0_l1": "l1_load_bytes_per_s"}


def parse_tier(status: Any, config: Any, model: str) -> ChunkTier | None:
    """How it keeps the chunks of `model` in Redis; None if it does not, or serves no engine of that model yet."""
    try:
        if status["hash_algorithm"] != _HASH:
            return None
        contexts = [each for name in _CONTEXTS for each in status.get(name, {}).values() if each["model_name"] == model]
        redis = [each for each in status["storage_manager"]["l2_adapters"] if each["type"] == "valkey"]
        adapters = config["storage_manager"]["l2_adapter_config"]["adapters"]
        ttl_s = next((each["ttl_seconds"] for each in adapters if each.get("ttl_seconds")), _DAY_S)
        if not contexts or not redis:
            return None
        world_size = int(contexts[0]["world_size"])
        return ChunkTier(str(redis[0]["key_prefix"]), model, int(status["chunk_size"]), world_size, int(ttl_s))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def parse_speeds(text: str) -> dict[str, float]:
    """l2_load_bytes_per_s (from Redis into the server's memory) and l1_load_bytes_per_s (from there into the engine's):
    the means of all loads so far. A speed without loads is left out."""
    sums: dict[tuple[str, str], float] = {}
    for sample in _THROUGHPUT.finditer(text):
        key = (sample["what"], sample["part"])
        sums[key] = sums.get(key, 0.0) + float(sample["value"])
    return {
        figure: sums[what, "sum"] / sums[what, "count"] * _GB
        for what, figure in _FIGURES.items()
        if sums.get((what, "count"))
    }
