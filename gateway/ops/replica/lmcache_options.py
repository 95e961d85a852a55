"""The arguments of `lmcache server`.

Only LMCache's `valkey` adapter is used for Redis: it sets a TTL on every chunk, treats an evicted chunk as a miss and
survives errors. `redis://` sets no TTL, and `resp` hangs on an evicted chunk and may return the bytes of another one.
"""

from __future__ import annotations

from typing import Any

from gateway.ops.replica.settings import (
    ChunkRedisAddress,
    ChunkRedisSettings,
    LmcacheSettings,
    MooncakeSettings,
    ReplicaFile,
)
from gateway.ops.replica.sharing import Pace
from gateway.ops.replica.vllm import compact, written

HERE = "127.0.0.1"
# When the folder is this full, LMCache deletes a fifth of its content.
_DISK_WATERMARK = 0.8
# Mooncake's own default is 30 s. Each cold request waits so long for a master that does not answer.
_MOONCAKE_TIMEOUT_MS = 1000
_GIB = 2**30
LAUNCHER = (
    "import os, sys; from urllib.parse import unquote, urlsplit; import glide_sync; "
    "from lmcache.cli.main import main; "
    "url, real = urlsplit(os.environ[sys.argv[1]]), glide_sync.ServerCredentials; "
    'right = {"username": unquote(url.username or "default"), "password": unquote(url.password or "")}; '
    "glide_sync.ServerCredentials = lambda *_, **__: real(**right); "
    'sys.argv = ["lmcache", *sys.argv[2:]]; main()'
)
"""Runs `lmcache server` with the credentials of the URL in the variable that its first argument names.

The adapter takes a password among its arguments, which every user of a host can read, and which the server's /config
shows. It also passes user name and password to its client in the wrong order (LMCache 0.5.6, valkey-glide 2.6). So this
gives the credentials to the client directly, and LMCache never sees them."""
_SOMEBODY = "default"
"""A user name. Without one, the adapter does not log in at all."""


def server_arguments(replica: ReplicaFile, tier: LmcacheSettings, chunk: int, pace: Pace | None) -> list[str]:
    options: dict[str, object] = {
        "instance-id": replica.id,
        "host": HERE,
        "port": tier.port,
        "http-host": HERE,
        "http-port": tier.http_port,
        "prometheus-port": tier.prometheus_port,
        "chunk-size": chunk,
        "hash-algorithm": "blake3",
        "l1-size-gb": f"{tier.cpu_gb:.10g}",
        "eviction-policy": "LRU" if tier.keep_in_cpu else "noop",
    }
    if not tier.keep_in_cpu:
        options["l2-store-policy"] = "skip_l1"
    adapters = []
    if tier.disk is not None:
        eviction = {"eviction_policy": "LRU", "trigger_watermark": _DISK_WATERMARK}
        place = {"base_path": tier.disk.folder, "max_capacity_gb": tier.disk.size_gb}
        adapters.append({"type": "fs_native", **place, "eviction": eviction})
    if tier.redis is not None and pace is not None:
        adapters.append(_redis(replica.chunk_redis, tier.redis, pace))
    if tier.mooncake is not None:
        adapters.append(_mooncake(tier.mooncake))
    return [
        "server",
        *written(options),
        *(part for adapter in adapters for part in ("--l2-adapter", compact(adapter))),
        *tier.extra_args,
    ]


def _redis(address: ChunkRedisAddress, redis: ChunkRedisSettings, pace: Pace) -> dict[str, Any]:
    adapter: dict[str, Any] = {
        "type": "valkey",
        "startup_nodes": address.address,
        "key_prefix": redis.key_prefix,
        "ttl_seconds": redis.ttl_seconds,
        "num_workers": pace.num_workers,
        "request_timeout": pace.request_timeout_s,
    }
    if address.database:
        adapter["database_id"] = address.database
    if address.tls:
        adapter["tls_enable"] = True
    if address.password:
        adapter["username"] = address.username or _SOMEBODY
    return adapter


def _mooncake(mooncake: MooncakeSettings) -> dict[str, Any]:
    return {
        "type": "mooncake_store",
        "protocol": "tcp",
        "master_server_addr": mooncake.master,
        "metadata_server": "P2PHANDSHAKE",  # clients tell each other, so that there is no metadata server
        "local_hostname": mooncake.host,
        "global_segment_size": str(round(mooncake.share_gb * _GIB)),
    }


def environment(tier: LmcacheSettings) -> dict[str, str]:
    """What the server's environment has to contain for its adapters."""
    if tier.mooncake is None:
        return {}
    return {f"MC_RPC_{each}TIMEOUT_MS": str(_MOONCAKE_TIMEOUT_MS) for each in ("", "CONNECT_")}


def about(replica: ReplicaFile, tier: LmcacheSettings, chunk: int) -> str:
    places = [f"{tier.cpu_gb:g} GB of CPU memory" + ("" if tier.keep_in_cpu else " as a buffer")]
    if tier.disk is not None:
        places.append(f"{tier.disk.size_gb:g} GB of disk")
    if tier.redis is not None:
        places.append(f"the Redis at {replica.chunk_redis.address}")
    if tier.mooncake is not None:
        places.append(f"the Mooncake store of {tier.mooncake.master}")
    return f"chunks of {chunk} tokens in {', '.join(places)}."
