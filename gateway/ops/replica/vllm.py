"""The arguments of `vllm serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gateway.ops.replica.settings import LmcacheSettings, ReplicaFile

_ALL = "0.0.0.0"
_HERE = "127.0.0.1"
# If KV was found and is gone when it is fetched, vLLM computes it. By default, vLLM would fail the request.
_RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def arguments(replica: ReplicaFile) -> list[str]:
    engine, tier = replica.vllm, replica.lmcache
    options: dict[str, object] = {
        "served-model-name": engine.served_model_name,
        "host": engine.host,
        "port": engine.port,
        "max-model-len": engine.max_model_len,
        "tensor-parallel-size": engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None,
        "dtype": engine.dtype if engine.dtype != "auto" else None,
        "kv-cache-dtype": engine.kv_cache_dtype if engine.kv_cache_dtype != "auto" else None,
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "block-size": engine.block_size,
        "prefix-caching-hash-algo": "sha256",
        "kv-events-config": compact(_events(replica)),
    }
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    if replica.cpu_offload is not None:
        options |= {"kv-offloading-size": f"{replica.cpu_offload.size_gb:.10g}", "kv-offloading-backend": "native"}
        # Events of the CPU tier then have the blocks' own hashes, so that the map knows its content.
        extra = {"self_describing_kv_events": True}
        options["kv-transfer-config"] = compact({**_RECOMPUTE, "kv_connector_extra_config": extra})
    if tier is not None:
        options["kv-transfer-config"] = compact(_transfer(tier))
    return ["serve", engine.model, *written(options), *flags, *engine.extra_args]


def _events(replica: ReplicaFile) -> dict[str, Any]:
    host = replica.events.host
    # vLLM binds its publishing socket only if the endpoint contains "*" or "::"; otherwise it connects it, to nothing.
    # An IPv4 address in IPv6 notation has the colons, and binds that address only.
    publishing = "*" if host == _ALL else f"[::ffff:{host}]"
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{publishing}:{replica.events.port}",
        "replay_endpoint": f"tcp://{'*' if host == _ALL else host}:{replica.events.replay_port}",
        "topic": f"kv@{replica.id}@{replica.vllm.served_model_name or replica.vllm.model}",
    }


def _transfer(tier: LmcacheSettings) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        **_RECOMPUTE,
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{_HERE}",
            "lmcache.mp.port": tier.port,
            "lmcache.mp.hash_algorithm": "blake3",
        },
    }


def local(host: str) -> str:
    """The address at which its own host reaches what listens on `host`."""
    return _HERE if host == _ALL else host


def has_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or not parse_qs(parts.query).keys().isdisjoint(("password", "sentinel_password"))


def written(options: Mapping[str, object]) -> Iterator[str]:
    """The arguments that give these options; what is None is left out."""
    for name, value in options.items():
        if value is not None:
            yield from (f"--{name}", str(value))


def compact(value: object) -> str:
    """As JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))
