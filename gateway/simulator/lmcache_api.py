"""The HTTP endpoints of LMCache's server (0.5.6) that KVGate uses: /status, /config, /metrics.

A real server has a port of its own. Here their paths begin with /lmcache, on the replica's port.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from gateway.simulator.control_api import not_found
from gateway.simulator.replica import SimReplica
from gateway.simulator.settings import SimLmcacheSettings, SimSettings

_REDIS_PORT = 6379


async def status(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    settings = replica.settings
    if settings.lmcache is None:
        return await not_found(replica, request)
    return web.json_response(_status(settings, settings.lmcache))


async def config(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    told = replica.settings.lmcache
    if told is None:
        return await not_found(replica, request)
    adapters = [_adapter_config(told, told.redis_url)] if told.redis_url else []
    return web.json_response({"storage_manager": {"l2_adapter_config": {"adapters": adapters}}})


async def metrics(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    if replica.lmcache is None:
        return await not_found(replica, request)
    registry = CollectorRegistry()
    for each in replica.lmcache.throughputs:
        registry.register(each)
    return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")


def _status(settings: SimSettings, told: SimLmcacheSettings) -> dict[str, Any]:
    """Lists one registered engine for each rank, as if they used GPUs."""
    adapters = [_adapter_status(told, told.redis_url)] if told.redis_url else []
    ranks = range(settings.data_parallel)
    context = {
        "model_name": settings.model_root,
        "world_size": 1,
        "kv_cache_layout": {
            "num_blocks": settings.num_gpu_blocks,
            "cache_size_per_token": told.kv_bytes_per_token,
        },
    }
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


def _adapter_status(told: SimLmcacheSettings, redis_url: str) -> dict[str, Any]:
    host, port, _ = _address(redis_url)
    return {
        "is_healthy": True,  # also if Redis does not answer
        "type": "valkey",
        "cluster_mode": False,
        "startup_nodes": [{"host": host, "port": port}],
        "key_prefix": told.key_prefix,
    }


def _adapter_config(told: SimLmcacheSettings, redis_url: str) -> dict[str, Any]:
    host, port, database = _address(redis_url)
    return {
        "startup_nodes": [[host, port]],
        "cluster_mode": False,
        "key_prefix": told.key_prefix,
        "database_id": database,
        "ttl_seconds": told.ttl_s,
    }


def _address(redis_url: str) -> tuple[str, int, int]:
    """Host, port and database."""
    parts = urlsplit(redis_url)
    return parts.hostname or "127.0.0.1", parts.port or _REDIS_PORT, int(parts.path.strip("/") or 0)
