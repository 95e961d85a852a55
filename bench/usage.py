"""Measures what the ledger of usage costs: Redis' time and memory, and a gateway's time.

So many gateways count so many requests a second, of so many tenants, keys and models, and flush once a second, as
gateways do. It tells the time of a core that Redis takes for a flush and for a request, a gateway's for a request, and
the memory of a row.

    python -m bench.usage [--gateways 8] [--requests-per-s 800] [--tenants 20] [--seconds 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import record
from bench.embedded import embedded_redis, info, redis_version
from bench.options import count
from coordinator.keys import usage_key
from coordinator.redis.wire import Wire
from coordinator.store import Store, StoreOptions
from coordinator.usage import Row, UsageStore
from gateway.billing.ledger import Ledger
from gateway.billing.prices import TokenCounts
from gateway.settings.billing_settings import BillingSettings

_KEYS_OF_TENANT, _MODELS = 3, ("chat", "small", "vision")
_PRICES = [{"model": model, "uncached_input_per_mtok": 1.0, "output_per_mtok": 4.0} for model in _MODELS]


async def run(wire: Wire, url: str, gateways: int, requests_per_s: int, tenants: int, seconds: int) -> dict[str, Any]:
    dice, store = random.Random(1), Store(StoreOptions(url, 1.0), "bench")
    running = asyncio.ensure_future(store.run())
    await store.first_attempt()
    settings = BillingSettings.model_validate({"prices": _PRICES})
    ledgers = [Ledger(settings, UsageStore(store, "", f"bench.{number}")) for number in range(gateways)]
    before, counting_s, flushes, began_s = await _cpu_us(wire), 0.0, 0, time.time()
    for second in range(seconds):
        for _ in range(requests_per_s):
            tenant = f"tenant-{dice.randrange(tenants)}"
            row = Row(tenant, f"{tenant}-{dice.randrange(_KEYS_OF_TENANT)}", dice.choice(_MODELS))
            ledger, tokens = dice.choice(ledgers), TokenCounts(dice.randrange(4000), dice.randrange(4000), 200)
            at = time.process_time()
            ledger.count(began_s + second, row, tokens, 0, is_error=False)
            counting_s += time.process_time() - at
        at = time.process_time()
        for ledger in ledgers:
            await ledger.flush()
        counting_s += time.process_time() - at
        flushes += gateways
    spent_us = await _cpu_us(wire) - before
    usage = UsageStore(store, "", "reader")
    [hour, *_] = await usage.hours()
    row_bytes = await wire.send("MEMORY", "USAGE", f"{usage_key()}:{hour}", "SAMPLES", 0)
    rows = len(await usage.rows(hour))
    running.cancel()
    requests = requests_per_s * seconds
    return {
        "flush_us": spent_us / flushes,
        "redis_us_per_request": spent_us / requests,
        "redis_share": spent_us / seconds / 1e6,
        "gateway_us_per_request": counting_s * 1e6 / requests,
        "rows_of_an_hour": rows,
        "row_bytes": row_bytes / rows,
    }


async def measured(url: str, options: argparse.Namespace) -> dict[str, Any]:
    wire = await Wire.open(url, 1.0, lambda _error: None)
    try:
        return await run(wire, url, options.gateways, options.requests_per_s, options.tenants, options.seconds)
    finally:
        await wire.close()


async def _cpu_us(wire: Wire) -> float:
    """The time that Redis has had a core for."""
    told = await info(wire, "cpu")
    return 1e6 * (float(told["used_cpu_user"]) + float(told["used_cpu_sys"]))


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.usage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("gateways", 8), ("requests-per-s", 800), ("tenants", 20), ("seconds", 20)):
        parser.add_argument(f"--{name}", type=count, default=default, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with embedded_redis() as url:
        version = asyncio.run(redis_version(url))
        told = asyncio.run(measured(url, options))
    for name, figure in told.items():
        Console().print(f"{name:24} {figure:.4g}")
    record.write(options.out, [told], {"redis": version})


if __name__ == "__main__":
    main()
