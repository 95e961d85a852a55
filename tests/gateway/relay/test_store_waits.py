"""How long a gateway waits for what a prefill has computed, and when it does not wait any more."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.errors import StoreDown
from coordinator.registry import SESSION, ReplicaRecord
from gateway.relay.pairs import store_waits
from gateway.relay.pairs.store_waits import StoreWaits

KEYS, ENDS = ["a", "b", "c"], [100, 200, 300]


class Looks:
    """Stands for the store: it hears what is asked, and answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bool | StoreDown | None) -> None:
        self.asked: list[list[str]] = []
        self.answer = answer
        monkeypatch.setattr(store_waits, "until_stored", self._until_stored)
        monkeypatch.setattr(store_waits, "_LEAST_WAIT_S", 0.01)

    async def _until_stored(self, _pool: Any, keys: list[str], _matched: int, _life: Any) -> bool:
        self.asked.append(keys)
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, StoreDown):
            raise self.answer
        return bool(self.answer)


def leg(mode: str = SESSION, incarnation: str = "life1") -> Any:
    life = ReplicaRecord("r0", "life1", "ready", 1000, 0, "http://r0")
    return SimpleNamespace(
        replica="r0",
        incarnation=incarnation,
        sent_s=time.monotonic(),
        placement=SimpleNamespace(mode=mode, matched_keys=0),
        request=SimpleNamespace(keys=KEYS, tokens=ENDS),
        pool=SimpleNamespace(records={"r0": life}),
    )


@pytest.mark.parametrize("answer", [None, False, StoreDown("away")], ids=["never", "no", "no store"])
async def test_a_wait_ends_and_after_some_in_vain_there_is_none(
    monkeypatch: pytest.MonkeyPatch, answer: bool | StoreDown | None
) -> None:
    looks, waits = Looks(monkeypatch, answer), StoreWaits()
    assert [await waits.has_stored(leg(), 300) for _ in range(5)] == [False] * 5
    assert len(looks.asked) == 3
    monkeypatch.setattr(store_waits.time, "monotonic", lambda: 10**9)
    looks.answer = True
    assert [await waits.has_stored(leg(), 300) for _ in range(2)] == [True] * 2
    assert len(looks.asked) == 5


async def test_a_key_that_ends_behind_the_prompt_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, waits = Looks(monkeypatch, True), StoreWaits()
    for tokens in (300, 299, 99):
        assert await waits.has_stored(leg(), tokens)
    assert looks.asked == [KEYS, KEYS[:2]]


@pytest.mark.parametrize("of", [{"mode": "partial"}, {"mode": ""}, {"incarnation": "life0"}])
async def test_where_nobody_can_tell_there_is_no_wait(monkeypatch: pytest.MonkeyPatch, of: dict[str, str]) -> None:
    looks = Looks(monkeypatch, True)
    assert await StoreWaits().has_stored(leg(**of), 300)
    assert looks.asked == []
