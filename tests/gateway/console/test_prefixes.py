"""What the console reads and tells of the prefixes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from coordinator.errors import StoreRefused
from coordinator.keys import PoolKeys
from coordinator.pool.pool import Pool
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.console import prefixes
from gateway.console.prefixes import Prefixes

KEYS = PoolKeys("m")


class Map:
    """A pool of a large fleet, in which each replica holds the same keys."""

    name, keys = "m", KEYS

    def __init__(self, replicas: int, keys: int) -> None:
        self.holders = [f"r{number}" for number in range(replicas)]
        self.records = {name: ReplicaRecord(name, "life1", "ready", 0, 0, "http://r") for name in self.holders}
        self.held = [f"{number:032x}" for number in range(keys)]
        self.hits = 8
        self.foreign = ""
        self.read_values = 0

    async def read(self, command: str, key: str, *arguments: Any) -> Any:
        if self.foreign and key == KEYS.own(self.foreign):
            raise StoreRefused("WRONGTYPE Operation against a key")
        if command == "ZREVRANGE":
            found: Any = [each.encode() for each in self.held[: arguments[1] + 1]]
        elif command == "HMGET":
            record = f"life1 claim gpu 16 {self.hits} 5 0 32".encode()
            found = [record if name in self.holders else None for name in arguments]
        else:
            assert command == "HLEN", "nothing whose size grows with the fleet"
            return len(self.holders)
        self.read_values += len(found)
        return found


def shown(pool: Map) -> Prefixes:
    store = SimpleNamespace(pool_names=lambda: ["m"], pool=lambda _name: cast("Pool", pool))
    return Prefixes(cast("Store", store))


async def look(view: Prefixes) -> list[dict[str, Any]]:
    return list(orjson.loads(await view.look())["prefixes"])


async def test_a_look_reads_no_more_in_a_larger_fleet() -> None:
    small, large = Map(32, 1000), Map(1000, 1000)
    assert (await look(shown(small)))[0]["copies"] == 32
    [first, *_] = found = await look(shown(large))
    assert large.read_values == small.read_values
    assert len(found) < 1000
    assert (first["copies"], len(first["owners"]), first["tokens"]) == (1000, 16, 32)


async def test_a_key_that_somebody_else_wrote_hides_no_other() -> None:
    pool = Map(3, 4)
    pool.foreign = pool.held[0]
    assert sorted(each["key"] for each in await look(shown(pool))) == pool.held[1:]


async def test_what_has_changed_since_the_first_look_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_EVERY_S", 0)
    pool = Map(3, 1)
    view = shown(pool)
    [first] = await look(view)
    assert (first["hits_since"], first["copies_lost"]) == (0, 0)
    pool.hits, pool.holders = 24, ["r0"]
    [then] = await look(view)
    assert (then["hits_since"], then["copies_lost"], then["since_ms"]) == (16, 2, first["since_ms"])
    monkeypatch.setattr(prefixes, "_FORGOTTEN_S", -1)
    [anew] = await look(view)
    assert (anew["hits_since"], anew["copies_lost"]) == (0, 0), "nobody had looked for long"
