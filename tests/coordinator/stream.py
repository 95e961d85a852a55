"""Fixtures for tests of event streams: an agent's connection, and a stream that is applied one entry at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import redis.asyncio as redis

from coordinator.agent.agent_store import AgentStore, Attended, Vitals
from coordinator.agent.residency import Evicted, Reset, Resident, Transition
from coordinator.errors import StoreDown
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, SPAN_TOKENS, now_ms
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


async def agent_record(
    client: redis.Redis,
    name: str = "r0",
    incarnation: str = "life1",
    mode: str = "session",
    relearning: int = 0,
    waiting: int = 0,
    lease_ms: int = 60_000,
) -> None:
    """Writes the record of an agent's heartbeat, with a lease as long as the test needs."""
    until_ms = await now_ms(client) + lease_ms
    await client.hset(KEYS.agents, name, f"agent0 {incarnation} {until_ms} {mode} {relearning} {waiting} -1")


async def followed(client: redis.Redis, name: str = "r0", applied_ms: int = 60_000, **record: Any) -> None:
    """Writes the result of an agent's and an applier's heartbeats. The replica is exact, unless `record` changes
    that."""
    await agent_record(client, name, **record)
    await client.hset(KEYS.leases, f"events:{name}", f"gw0 {await now_ms(client) + applied_ms}")


def gains(keys: list[str], first: int = 0, medium: str = "gpu", span: int = SPAN_TOKENS) -> list[Resident]:
    """Transitions that make a chain's keys resident, starting with the key at index `first`."""
    return [
        Resident(key, span * (i + 1), span, medium, BLOCK_HASH + i) for i, key in enumerate(keys[first:], start=first)
    ]


def losses(keys: list[str]) -> list[Evicted]:
    return [Evicted(key) for key in keys]


async def lead(
    pool: Pool, who: str = "gw0", lease_ms: int = 60_000, leaving: bool = False, known: Iterable[str] = ()
) -> dict[str, str]:
    """One heartbeat of an applier: the replicas that it holds, and their cursors."""
    flat = await pool.run("lead", applier=who, lease_ms=lease_ms, leaving=leaving, known=list(known))
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


class Stream:
    """One replica's stream. `say` publishes an entry, and `apply_all` applies the entries after the cursor."""

    def __init__(self, pool: Pool, client: redis.Redis, link: AgentStore, name: str = "r0") -> None:
        self._pool = pool
        self._client = client
        self.link = link
        self.name = name

    async def say(self, *transitions: Transition) -> int:
        """Publishes one entry and returns its number."""
        return await self.link.publish(transitions, 0.0, 0)

    async def cursor(self) -> str:
        return await self._client.hget(KEYS.cursors, self.name) or ""

    async def unread(self) -> list[tuple[str, dict[str, str]]]:
        """The entries after the cursor."""
        after = (await self.cursor()).split(" ")[0]
        return list(await self._client.xrange(KEYS.events(self.name), f"({after}" if after else "-"))

    async def offer(self, entry: tuple[str, dict[str, str]], cursor: str, who: str = "gw0") -> list[Any]:
        """The script's reply to one entry, for an applier that believes the cursor is `cursor`."""
        entry_id, fields = entry
        lines = fields["transitions"].split("\n")
        reply = await self._pool.run(
            "apply",
            applier=who,
            replica=self.name,
            known_cursor=cursor,
            stream_id=entry_id,
            number=fields["n"],
            incarnation=fields["inc"],
            happened_ms=fields["at_ms"],
            keys=[line.split(" ")[1] for line in lines if line[0] in "+-"],
            transitions=lines,
        )
        return [part.decode() if isinstance(part, bytes) else part for part in reply]

    async def apply_all(self, who: str = "gw0") -> list[list[Any]]:
        """Applies all unread entries, in order."""
        return [await self.offer(entry, await self.cursor(), who) for entry in await self.unread()]


async def counted_tokens(client: redis.Redis, holding_only: bool = False) -> dict[str, int]:
    """The correct owned_tokens of each replica, counted from the ownership records. It counts records of the current
    incarnation whose last use is after its start. With `holding_only` it leaves out residents below the floor."""
    registry = {name: text.split(" ") for name, text in (await client.hgetall(KEYS.replicas)).items()}
    sums: dict[str, int] = {}
    async for key in client.scan_iter(KEYS.own("*")):
        for name, text in (await client.hgetall(key)).items():
            incarnation, kind, _, span, _, used, by, *_ = text.split(" ")
            current, _, _, since, floor, _ = registry[name]
            is_void = holding_only and kind == "resident" and int(by) < int(floor)
            if incarnation == current and int(used) >= int(since) and not is_void and span != "0":
                sums[name] = sums.get(name, 0) + int(span)
    return sums
