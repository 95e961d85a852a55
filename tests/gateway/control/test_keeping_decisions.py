"""What one gateway keeps of its requests: bounded here, and smaller while Redis is short of memory."""

from __future__ import annotations

import time
from typing import Any, cast

import orjson
import pytest
from prometheus_client import CollectorRegistry

from coordinator.keys import WATCHER
from coordinator.store import Store
from gateway.control import past_decisions
from gateway.control.past_decisions import PastDecisions
from gateway.errors import ApiError
from gateway.metrics.fast_counters import FastCounter
from gateway.request.keyring import Keyring
from gateway.settings.gateway_settings import DecisionSettings, SecuritySettings

MIB = 2**20


class NotedStore:
    """A store that notes what it is asked, and has a report of its memory."""

    def __init__(self) -> None:
        self.used, self.most = 0, 0
        self.kept: list[tuple[str, bytes]] = []
        self.max_bytes: list[int] = []
        self.deleted = 0

    async def ask(self, command: str, key: str, *_more: Any) -> Any:
        self.deleted += command == "UNLINK"
        if command == "HSET":
            self.kept += zip(_more[::2], _more[1::2], strict=True)
        if key != WATCHER:
            return [dict(self.kept).get(name) for name in _more]
        numbers = {"evicted_keys": 0, "refused_writes": 0, "hits": 0, "misses": 0, "scripts_per_s": 0, "script_us": 0}
        told = {"version": "8", "policy": "volatile-lru", "chunks": 0, "kinds": {}, "conditions": {}} | numbers
        report = told | {"used_bytes": self.used, "maxmemory_bytes": self.most}
        return b"gw0 %d " % ((time.time() + 60) * 1000) + orjson.dumps(report)

    async def ask_script(self, _script: str, _key: str, **operands: Any) -> int:
        self.max_bytes.append(operands["max_bytes"])
        return 0


@pytest.fixture
def store() -> NotedStore:
    return NotedStore()


@pytest.fixture
def counter() -> FastCounter:
    return FastCounter("kvgate_decisions_not_kept", "", ["why"], CollectorRegistry())


def keeping(store: NotedStore, counter: FastCounter, max_bytes: int = 64 * MIB) -> PastDecisions:
    keyring = Keyring(SecuritySettings())
    return PastDecisions(cast("Store", store), "", keyring, DecisionSettings(max_bytes=max_bytes), counter)


def record(request_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"time": "2026-11-28T12:00:00.000+00:00", "tenant": None, "request_id": request_id, **fields}


@pytest.mark.parametrize(
    ("used", "most", "allowed"),
    [(90 * MIB, 100 * MIB, 64 * MIB), (96 * MIB, 100 * MIB, MIB), (10**12, 10**12, 64 * MIB), (96 * MIB, 0, 64 * MIB)],
)
async def test_while_redis_is_short_of_memory_decisions_get_a_hundredth_of_it(
    store: NotedStore, counter: FastCounter, used: int, most: int, allowed: int
) -> None:
    store.used, store.most = used, most
    past = keeping(store, counter)
    past.note(record())
    await past.flush()
    assert set(store.max_bytes) == {allowed}


async def test_turned_off_it_keeps_nothing_and_deletes_what_is_there(store: NotedStore, counter: FastCounter) -> None:
    past = keeping(store, counter)
    past.note(record("a"))
    await past.flush()
    past.use(DecisionSettings(max_bytes=0))
    past.note(record("b"))
    await past.flush()
    assert ([name for name, _ in store.kept], store.deleted) == (["/a"], 1)


async def test_what_would_take_too_much_is_counted_and_left_out(
    store: NotedStore, counter: FastCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_decisions, "_MOST_WAITING_BYTES", 200)
    past = keeping(store, counter)
    past.note(record("large", model="".join(f"{number:x}" for number in range(10_000))))
    for number in range(100):
        past.note(record(str(number)))
    await past.flush()
    assert 0 < len(store.kept) < 10
    lost = {sample.labels["why"]: sample.value for each in counter.collect() for sample in each.samples}
    assert lost == {"too_large": 1, "too_many": 100 - len(store.kept)}


async def test_what_somebody_wrote_there_by_hand_is_passed_over(store: NotedStore, counter: FastCounter) -> None:
    past = keeping(store, counter)
    past.note(record("a"))
    await past.flush()
    whole = store.kept[0][1]
    store.kept = [("/a", whole + whole[:-5])]
    anyone = Keyring(SecuritySettings()).identify({})
    assert {each["request_id"] for each in (await past.find(anyone, "a"))["decisions"]} == {"a"}
    store.kept = [("/a", b"garbage")]
    with pytest.raises(ApiError) as refused:
        await past.find(anyone, "a")
    assert refused.value.code == "decision_not_found"


def test_no_tenants_name_is_the_beginning_of_anothers_field() -> None:
    names = [past_decisions._name(tenant, each) for tenant, each in [("a", "b/c"), ("a/b", "c"), (None, "a/c")]]
    assert len(set(names)) == 3
    assert [name.count("/") for name in names] == [2, 1, 2]
