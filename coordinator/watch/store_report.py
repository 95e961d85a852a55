"""What the process that watches this Redis has found, for all gateways: it stands in the lease of the watch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from coordinator.keys import WATCHER
from coordinator.watch.watch_session import Report


def noted(report: Report) -> bytes:
    """As it stands in the lease."""
    info, estimate = report.info, report.estimate
    return orjson.dumps(
        {
            "version": info.version_text,
            "policy": info.policy,
            "used_bytes": info.used_bytes,
            "maxmemory_bytes": info.maxmemory_bytes,
            "evicted_keys": info.evicted_keys,
            "refused_writes": info.refused_writes,
            "hits": info.hits,
            "misses": info.misses,
            "scripts_per_s": round(report.scripts_per_s, 1),
            "script_us": round(report.script_us, 1),
            "kinds": {
                kind: {
                    "keys": round(estimate.keys[kind]),
                    "bytes": round(estimate.bytes[kind]),
                    "evicted": report.evicted.get(kind, 0) if report.hears else None,
                }
                for kind in estimate.keys
            },
            "chunks": report.chunks,
            "conditions": dict(report.conditions),
        }
    )


async def read_report(ask: Callable[..., Awaitable[Any]]) -> dict[str, Any]:
    """What the watcher has noted last, under the names above, and who it is; empty if nobody watches, or it cannot be
    read. `ask` is that of the store. Raises StoreError."""
    lease = await ask("GET", WATCHER)
    who, _, rest = (lease or b"").partition(b" ")
    try:
        found = orjson.loads(rest.partition(b" ")[2])
    except ValueError:
        return {}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in ("kinds", "conditions")):
        return {}
    return found | {"watcher": who.decode("utf-8", "replace")}
