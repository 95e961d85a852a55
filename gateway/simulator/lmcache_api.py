"""The HTTP endpoints of LMCache's server (0.5.6) that KVGate uses: /status, /config, /metrics.

A real server has a port of its own. Here their paths begin with /lmcache, on the replica's port.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import generate_latest

from gateway.simulator.errors import not_found
from gateway.simulator.replica import SimReplica
from gateway.simulator.settings import SimLmcacheSettings

_REDIS_PORT = 6379


def status(replica: SimReplica) -> dict[str, Any]:
    """Lists one registered engine for each rank, as if they used GPUs."""
    settings, told = replica.settings, _settings(replica)
    host, port, _ = _address(told)
    adapter = {
        "is_healthy": True,  # also if Redis does not answer
        "type": "valkey",
        "cluster_mode": False,
        "startup_nodes": [{"host": host, "port": port}],
        "key_prefix": told.key_prefix,
    }
    adapters = [adapter] if told.redis_url else []
    ranks = range(settings.data_parallel)
    layout = {"num_blocks": settings.num_gpu_blocks, "cache_size_per_token": told.kv_bytes_per_token}
    context = {"model_name": settings.model, "world_size": 1, "kv_cache_layout": layout}
    return {
        "is_healthy": True,
        "engine_type": "MPCacheServer",
        "chunk_size": told.chunk_tokens,
        "hash_algorithm": "blake3",
        "storage_manager": {"is_healthy": True, "l2_adapters": adapters, "num_l2_adapters": len(adapters)},
        "registered_gpu_ids": list(ranks),
        "cache_context_meta": {str(rank): context for rank in ranks},
        "registered_non_cuda_instance_ids": [],
        "non_cuda_context_meta": {},
    }


def config(replica: SimReplica) -> dict[str, Any]:
    told = _settings(replica)
    host, port, database = _address(told)
    adapter = {
        "startup_nodes": [[host, port]],
        "cluster_mode": False,
        "key_prefix": told.key_prefix,
        "database_id": database,
        "ttl_seconds": told.ttl_s,
    }
    return {"storage_manager": {"l2_adapter_config": {"adapters": [adapter] if told.redis_url else []}}}


async def metrics(replica: SimReplica, _: web.Request) -> web.StreamResponse:
    if replica.lmcache is None:
        raise not_found()
    return web.Response(body=generate_latest(replica.lmcache.metrics), content_type="text/plain", charset="utf-8")


def _settings(replica: SimReplica) -> SimLmcacheSettings:
    if replica.settings.lmcache is None:
        raise not_found()
    return replica.settings.lmcache


def _address(told: SimLmcacheSettings) -> tuple[str, int, int]:
    """Redis' host, port and database."""
    parts = urlsplit(told.redis_url or "")
    return parts.hostname or "127.0.0.1", parts.port or _REDIS_PORT, int(parts.path.strip("/") or 0)
