"""Fixtures for tests of event streams: an agent's connection, and the stream that it writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import redis.asyncio as redis

from coordinator.agent.agent_store import AgentStore, Attended, Vitals
from coordinator.agent.residency import Evicted, Reset, Resident, Transition
from coordinator.errors import StoreDown
from tests.coordinator.stage import KEYS, SPAN_TOKENS, keys_of, now_ms
from tests.polling import eventually

VITALS = Vitals("session", False, 0, -1, {})
BLOCK_HASH = 0xA11CE
RESET = Reset()


@asynccontextmanager
async def linked(
    url: str, name: str = "r0", agent: str = "agent0", incarnation: str = "life1"
) -> AsyncIterator[AgentStore]:
    """An agent's connection, before its first heartbeat. Like an agent, it tries again: the machine may stall."""

    async def opened() -> AgentStore | None:
        with suppress(StoreDown):
            return await AgentStore.open(url, "m", name, agent)
        return None

    link: AgentStore = await eventually(opened)
    try:
        await link.register(incarnation, 0, f"http://{name}.test:8000")
        yield link
    finally:
        await link.close()


async def attend(link: AgentStore, leaving: bool = False, **changes: Any) -> Attended:
    """Sends a heartbeat, which must succeed."""
    answer = await link.attend(replace(VITALS, **changes), leaving)
    assert isinstance(answer, Attended)
    return answer


async def followed(
    client: redis.Redis,
    name: str = "r0",
    incarnation: str = "life1",
    mode: str = "session",
    relearning: int = 0,
    waiting: int = 0,
    lease_ms: int = 60_000,
) -> None:
    """Writes the record of an agent's heartbeat, with a lease as long as the test needs. The replica is exact, unless
    `mode` changes that."""
    until_ms = await now_ms(client) + lease_ms
    await client.hset(KEYS.agents, name, f"agent0 {incarnation} {until_ms} {mode} {relearning} {waiting} -1")


def gains(keys: list[str], first: int = 0, medium: str = "gpu", span: int = SPAN_TOKENS) -> list[Resident]:
    """Transitions that make a chain's keys resident, starting with the key at index `first`."""
    return [
        Resident(key, span * (i + 1), span, medium, BLOCK_HASH + i) for i, key in enumerate(keys[first:], start=first)
    ]


def losses(keys: list[str]) -> list[Evicted]:
    return [Evicted(key) for key in keys]


class Stream:
    """One replica's stream, for its agent."""

    def __init__(self, link: AgentStore, name: str = "r0") -> None:
        self.link = link
        self.name = name

    async def say(self, *transitions: Transition) -> int:
        """Publishes one entry and returns its number."""
        return await self.link.publish(transitions, 0.0, 0)

    async def say_all(self, residents: Sequence[Resident], seq: int = 0) -> None:
        """Publishes everything again that is resident."""
        await say_all(self.link, residents, seq)


async def say_all(link: AgentStore, residents: Sequence[Resident], seq: int = 0) -> None:
    """Publishes everything again that is resident, as a restatement in one piece."""
    await link.void_before(await link.publish(residents, 0.0, None), seq)


async def counted_tokens(client: redis.Redis, holding_only: bool = False) -> dict[str, int]:
    """The correct owned_tokens of each replica, counted from the ownership records. It counts records of the current
    incarnation whose last use is after its start. With `holding_only` it leaves out residents below the floor."""
    registry = {name: text.split(" ") for name, text in (await client.hgetall(KEYS.replicas)).items()}
    sums: dict[str, int] = {}
    for key in await keys_of(client, KEYS.own("*")):
        for name, text in (await client.hgetall(key)).items():
            incarnation, kind, _, span, _, used, by, *_ = text.split(" ")
            current, _, _, since, floor, _ = registry[name]
            is_void = holding_only and kind == "resident" and int(by) < int(floor)
            if incarnation == current and int(used) >= int(since) and not is_void and span != "0":
                sums[name] = sums.get(name, 0) + int(span)
    return sums
