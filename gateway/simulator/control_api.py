"""All endpoints but inference: models, health, metrics, LoRA, and the simulator's own /sim paths.

Of LMCache's server (0.5.6), there are the paths that KVGate uses: /status, /config, /metrics. A real server has a port
of its own. Here they begin with /lmcache, on the replica's port.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import generate_latest

from gateway.simulator import fields
from gateway.simulator.call import read_json
from gateway.simulator.errors import bad_request, not_found
from gateway.simulator.faults import hang
from gateway.simulator.prompt import token_text
from gateway.simulator.replica import SimReplica
from gateway.simulator.settings import SimLmcacheSettings

_EVENT_SOURCES_SINCE = (0, 32)
_REDIS_PORT = 6379


def models(replica: SimReplica) -> dict[str, Any]:
    settings = replica.settings
    cards = [_card(replica, name, settings.model, None) for name in settings.served_names]
    cards += [_card(replica, name, name, settings.served_names[0]) for name in replica.adapters]
    return {"object": "list", "data": cards}


def kv_event_sources(replica: SimReplica) -> dict[int, Any]:
    """Each rank's publisher; empty if KV events are off."""
    if replica.settings.version < _EVENT_SOURCES_SINCE:
        raise not_found()
    return {publisher.rank: publisher.config() for publisher in replica.publishers}


def load(replica: SimReplica) -> dict[str, int]:
    """The queues only, for a fraction of the cost of /sim/state."""
    return {
        "running": sum(len(engine.running) for engine in replica.engines),
        "waiting": sum(len(engine.waiting) for engine in replica.engines),
    }


async def health(replica: SimReplica, _: web.Request) -> web.StreamResponse:
    return web.Response(status=503 if replica.faults.take("unhealthy") else 200)


async def fetch(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Another server takes the KV blocks of a prompt that was computed here."""
    told = await read_json(request)
    if replica.nixl is None or replica.faults.take("no_blocks"):
        raise not_found()
    await replica.faults.until_free()
    return web.json_response({"is_there": replica.nixl.unpin(told["engine_id"], told["name"])})


async def pd_role(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Tells the role, or begins to change it."""
    if replica.pd_role is None:
        raise not_found()
    if request.method == "GET":
        return web.json_response(replica.pd_role.status())
    replica.pd_role.switch(await read_json(request))
    return web.json_response(replica.pd_role.status(), status=202)


async def query(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Mooncake's bootstrap server: which engine this is."""
    if replica.mooncake is None:
        raise not_found()
    if replica.faults.take("no_bootstrap"):
        await hang()
    return web.json_response(replica.mooncake.query(str(request.url.origin())))


async def push(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Another server waits for the KV blocks of a prompt that is computed here."""
    told = await read_json(request)
    if replica.mooncake is None:
        raise not_found()
    if replica.faults.take("no_blocks"):
        return web.json_response({"error": "Mooncake transfer engine returned -1"})
    if replica.faults.take("no_push"):
        await hang()
    pushed = await replica.mooncake.push(told["engine_id"], told["transfer_id"])
    await replica.faults.until_free()
    return web.json_response(pushed)


async def metrics(replica: SimReplica, _: web.Request) -> web.StreamResponse:
    body, content_type = generate_latest(replica.metrics.registry), "text/plain; version=0.0.4"
    if replica.settings.rust_frontend:
        body, content_type = body + b"# EOF\n", "application/openmetrics-text; version=1.0.0"
    return web.Response(body=body, headers={"Content-Type": f"{content_type}; charset=utf-8"})


async def detokenize(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Never reaches the engine, so that no fault affects it."""
    body = await read_json(request)
    replica.resolve_model(fields.text(body, "model"))
    return web.json_response({"prompt": token_text(fields.sequence(body, "tokens"))})


async def load_lora_adapter(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    replica.num_lora_calls += 1
    name = fields.required_text(await read_json(request), "lora_name")
    if name not in replica.adapters:
        replica.adapters.append(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    replica.num_lora_calls += 1
    name = fields.required_text(await read_json(request), "lora_name")
    if name in replica.adapters:
        replica.adapters.remove(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def reset_prefix_cache(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Keeps the CPU tier unless the request names it, as vLLM does."""
    return web.json_response({"reset": replica.clear_caches(request.query.get("reset_external") == "true")})


async def sleep(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    level = int(_one_of(request, "level", "1", "0", "2"))
    replica.sleep.sleep(level, _one_of(request, "mode", "abort", "keep"))
    return web.json_response({"status": "sleeping", "level": level})


async def wake_up(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    tags = request.query.getall("tags", [])
    status = "awake" if replica.sleep.wake_up(tags) else "sleeping"
    return web.json_response({"status": status, "tags": tags or None})


async def pause(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    replica.sleep.pause(_one_of(request, "mode", "abort", "keep"), request.query.get("clear_cache", "true") == "true")
    return web.json_response({"status": "paused"})


async def resume(replica: SimReplica, _: web.Request) -> web.StreamResponse:
    replica.sleep.resume()
    return web.json_response({"status": "resumed"})


async def abort_requests(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    """Aborts all requests, as vLLM does if the body names none."""
    if (await read_json(request)).get("request_ids"):
        raise bad_request("request_ids: only all requests can be aborted here", "request_ids")
    aborted = sum(engine.abort_all() for engine in replica.engines)
    return web.json_response({"status": "aborted", "aborted": aborted})


async def is_sleeping(replica: SimReplica, _: web.Request) -> web.StreamResponse:
    """The engines answer it, between two steps."""
    await replica.faults.goes_on.wait()
    return web.json_response({"is_sleeping": replica.sleep.is_sleeping})


async def fail(replica: SimReplica, request: web.Request) -> web.StreamResponse:
    if replica.faults.set(await read_json(request)).mode == "amnesia":
        for engine in replica.engines:
            engine.forget_idle()
    return web.json_response({"failing": replica.faults.active()})


def _one_of(request: web.Request, name: str, default: str, *others: str) -> str:
    """A query's parameter. Raises a 400."""
    value = request.query.get(name, default)
    if value not in (default, *others):
        raise bad_request(f"{name}: one of {', '.join((default, *others))}", name)
    return value


def _card(replica: SimReplica, name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": replica.settings.max_model_len,
        "permission": [],
    }


def lmcache_status(replica: SimReplica) -> dict[str, Any]:
    """Lists one registered engine for each rank, as if they used GPUs."""
    settings, told = replica.settings, _lmcache_of(replica)
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


def lmcache_config(replica: SimReplica) -> dict[str, Any]:
    told = _lmcache_of(replica)
    host, port, database = _address(told)
    adapter = {
        "startup_nodes": [[host, port]],
        "cluster_mode": False,
        "key_prefix": told.key_prefix,
        "database_id": database,
        "ttl_seconds": told.ttl_s,
    }
    return {"storage_manager": {"l2_adapter_config": {"adapters": [adapter] if told.redis_url else []}}}


async def lmcache_metrics(replica: SimReplica, _: web.Request) -> web.StreamResponse:
    if replica.lmcache is None:
        raise not_found()
    return web.Response(body=generate_latest(replica.lmcache.metrics), content_type="text/plain", charset="utf-8")


def _lmcache_of(replica: SimReplica) -> SimLmcacheSettings:
    if replica.settings.lmcache is None:
        raise not_found()
    return replica.settings.lmcache


def _address(told: SimLmcacheSettings) -> tuple[str, int, int]:
    """Redis' host, port and database."""
    parts = urlsplit(told.redis_url or "")
    return parts.hostname or "127.0.0.1", parts.port or _REDIS_PORT, int(parts.path.strip("/") or 0)
