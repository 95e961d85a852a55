"""What an engine's metrics tell of prompts whose KV cache goes to another engine. Pure.

vLLM tells its connector nowhere that a client may ask: /server_info has it in development mode only. But NixlConnector
and MooncakeConnector have metrics of their own, from the start, alone or in a MultiConnector. vLLM before 0.33 has none
for Mooncake, and no version has any for LMCache.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_SAMPLE: Final = re.compile(
    r"\nvllm:(nixl|mooncake)_(xfer_time_seconds_count|num_kv_expired_reqs_total)(?:\{(?:[^\"}\n]|\"(?:[^\"\\\n]|\\.)*+\")*+\})?"
    r"[ \t]+([0-9.e+-]{1,32})"
)


class KvTransfers(NamedTuple):
    """Of all ranks of a server, since it started."""

    connectors: frozenset[str]
    """As `pairs.protocol` calls them."""
    done: float
    expired: float
    """Prompts that it computed for another engine, and that nobody took in time."""


def parse_transfers(text: str) -> KvTransfers:
    """Those in a Prometheus exposition. Raises ValueError if its numbers are none."""
    samples = _SAMPLE.findall("\n" + text)
    counts = {"xfer_time_seconds_count": 0.0, "num_kv_expired_reqs_total": 0.0}
    for _, name, value in samples:
        counts[name] += float(value)
    return KvTransfers(frozenset(connector for connector, _, _ in samples), *counts.values())
