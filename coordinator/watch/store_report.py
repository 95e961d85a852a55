"""What the process that watches this Redis has found, for all gateways: it stands in the lease of the watch."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from coordinator.keys import WATCHER
from coordinator.registry import is_number, readable
from coordinator.watch.watch_session import Report

_LATE_MS = 10_000
"""How long a report is good behind the end of its lease: this machine's clock may be another one than Redis'."""
_TEXTS, _OF_KIND, _MOST_TEXT = ("version", "policy"), ("keys", "bytes", "evicted"), 100
_OF_INFO = ("used_bytes", "maxmemory_bytes", "evicted_keys", "refused_writes", "hits", "misses")
_NUMBERS = (*_OF_INFO, "scripts_per_s", "script_us", "chunks")


def noted(report: Report) -> bytes:
    """As it stands in the lease."""
    info, estimate = report.info, report.estimate
    return orjson.dumps(
        {
            "version": info.version_text,
            "policy": info.policy,
            **{name: getattr(info, name) for name in _OF_INFO},
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
    until_ms, _, text = rest.partition(b" ")
    if not is_number(until_ms) or int(until_ms) + _LATE_MS < time.time() * 1000:
        return {}  # it is of a watcher that has gone
    try:
        found = orjson.loads(text)
        kinds = {str(kind): {name: _number(of.get(name)) for name in _OF_KIND} for kind, of in found["kinds"].items()}
        conditions = {str(name): str(words) for name, words in found["conditions"].items()}
        texts = {name: str(found[name])[:_MOST_TEXT] for name in _TEXTS}
        numbers = {name: _number(found[name]) for name in _NUMBERS}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}
    about = {"watcher": readable(who), "kinds": kinds, "conditions": conditions}
    return {**texts, **numbers, **about}


def _number(value: Any) -> float | None:
    """None if it is none."""
    return value if isinstance(value, int | float) else None
