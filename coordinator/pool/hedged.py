"""What gateways tell each other of late first bytes, and of what they have placed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from coordinator.registry import each


class FirstBytes(NamedTuple):
    """How the first bytes of one replica came."""

    late: int = 0
    all: int = 0


async def tell(
    run: Callable[..., Awaitable[Any]], placed_tokens: int, first_bytes: Mapping[str, FirstBytes]
) -> dict[str, bool]:
    """Tells what this gateway has placed for computing since it told last, and how first bytes came, by replica. `run`
    runs a script of its pool. Returns the replicas that were late lately, over all gateways, and whether they are slow:
    of these, gateways go on to tell. Raises StoreError."""
    text = " ".join(f"{replica} {late} {count}" for replica, (late, count) in first_bytes.items())
    reply = await run("hedge", placed_tokens=placed_tokens, first_bytes=text)
    return {
        name.decode("utf-8", "replace"): is_slow == 1 for name, is_slow in zip(reply[::2], reply[1::2], strict=True)
    }


def slow_replicas(late: Any, now_ms: int) -> list[str]:
    """The replicas that count as slow, by the hash `late` (flat pairs)."""
    until_ms = each(late, lambda _, record: int(record.split(" ")[3]))
    return [replica for replica, ends_ms in until_ms.items() if ends_ms > now_ms]
