"""Which of the replicas of several sources are used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from gateway.replicas.discovery.discovery import Discovery
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.tasks import Tasks


@dataclass
class Found:
    """A source that has told all it knows."""

    name: str
    replicas: list[ReplicaSettings]
    retry_s = 3600.0

    async def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        yield self.replicas


def replica(name: str, host: str, rank: int | None = None) -> ReplicaSettings:
    return ReplicaSettings(id=name, url=f"http://{host}:8000", dp_rank=rank)


async def test_a_listed_replica_goes_first_and_then_the_first_source() -> None:
    sources = [
        Found("dns", [replica("a-8000", "a"), replica("b", "b")]),
        Found("added", [replica("a", "x"), replica("c", "b"), replica("d", "d")]),
    ]
    used: list[list[ReplicaSettings]] = []
    tasks, discovery = Tasks(), Discovery([replica("a", "a")], sources, used.append)
    tasks.spawn(discovery.run(), "discovery")
    async with asyncio.timeout(10):
        await discovery.first_answers()
    assert discovery.sources == {"a": "configuration", "b": "dns", "d": "added"}
    assert [each.id for each in used[-1]] == ["a", "b", "d"]
    assert {name: each.why for name, each in discovery.outranked["added"].items()} == {
        "a": "a comes from configuration already",
        "c": "http://b:8000 is b already, from dns",
    }
    await tasks.close()


@pytest.mark.parametrize(
    ("listed", "added", "is_taken"), [(0, 1, False), (0, 0, True), (None, 1, True), (0, None, True)]
)
async def test_each_rank_of_a_server_is_an_engine_and_a_server_without_a_rank_is_all_of_them(
    listed: int | None, added: int | None, is_taken: bool
) -> None:
    discovery = Discovery([replica("a", "a", listed)], [], lambda _: None)
    assert bool(discovery.taken(replica("b", "a", added))) == is_taken
