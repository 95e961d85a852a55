"""What a gateway knows of the engines behind Mooncake's bootstrap servers, and for how long it trusts them."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.engine.facts import EngineFacts
from coordinator.registry import ReplicaRecord
from gateway.relay.pairs import bootstraps, mooncake
from gateway.relay.pairs.bootstraps import Bootstraps, Engine, engine_id_of, parse_engines
from gateway.relay.pairs.mooncake import MooncakePairs
from gateway.relay.pairs.protocol import LegAnswer
from gateway.replicas.member import Member
from gateway.settings.base import BOOTSTRAP_PORT_LABEL
from gateway.tasks import Tasks
from gateway.upstream import UpstreamError

_ODD_RANKS = [f'{{"{rank}": {{"engine_id": "a"}}}}' for rank in ("x", "-1", "9" * 5000)]


class Servers:
    """Stand for all bootstrap servers: each has one engine, whose id is a count of the questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.are_away = False

    async def get(self, url: str, path: str, _timeout_s: float, with_key: bool) -> Any:
        assert not with_key
        self.asked.append(url + path)
        await asyncio.sleep(0)
        if self.are_away:
            raise UpstreamError("refused", "nobody listens")
        return SimpleNamespace(status=200, body=json.dumps({"0": {"engine_id": f"e{len(self.asked)}"}}).encode())


def leg(incarnation: str = "life1", url: str = "http://10.0.0.7:8000", now: str = "life1 ready") -> Any:
    """One that was placed in a life of its replica; the registry has what is so `now`."""
    life, state = now.split()
    records = {"r0": ReplicaRecord("r0", life, state, 1000, 0, url)}
    pool = SimpleNamespace(records=records)
    return SimpleNamespace(replica="r0", incarnation=incarnation, url=url, pool=pool, sent_s=time.monotonic())


def known_of(servers: Servers, **labels: str) -> Bootstraps:
    member = Member("r0", "http://10.0.0.7:8000", labels=labels)
    fleet: Any = SimpleNamespace(members={"r0": member})
    upstream: Any = servers
    return Bootstraps(fleet, upstream, Tasks())


async def test_requests_share_a_question_until_the_replica_lives_again_or_a_leg_fails_or_the_answer_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers()
    known = known_of(servers)
    engines = await asyncio.gather(*(known.engine_of(leg()) for _ in range(5)))
    assert set(engines) == {Engine("http://10.0.0.7:8998", "e1")}
    assert servers.asked == ["http://10.0.0.7:8998/query"]
    assert await known.engine_of(leg("life2")) == Engine("http://10.0.0.7:8998", "e2")
    known.forget(leg())
    assert await known.engine_of(leg("life2")) == Engine("http://10.0.0.7:8998", "e3")
    assert await known.engine_of(leg("life2")) == Engine("http://10.0.0.7:8998", "e3")
    monkeypatch.setattr(bootstraps.time, "monotonic", lambda: 10**9)
    assert await known.engine_of(leg("life2")) == Engine("http://10.0.0.7:8998", "e4")


async def test_a_server_that_is_away_is_not_asked_for_each_request_and_its_port_is_a_label() -> None:
    servers = Servers()
    servers.are_away = True
    known = known_of(servers, **{BOOTSTRAP_PORT_LABEL: "9001"})
    for _ in range(3):
        assert await known.engine_of(leg(url="http://[fd00::7]:8000")) is None
        known.forget(leg(url="http://[fd00::7]:8000"))
    assert servers.asked == ["http://[fd00::7]:9001/query"]


@pytest.mark.parametrize(
    ("dp_rank", "ranks", "ids", "engine_id"),
    [
        (None, (), {0: "a"}, "a"),
        (5, (5,), {0: "a"}, "a"),  # a server for each rank: it counts from 0
        (5, (4, 5), {0: "a", 1: "b"}, "b"),
        (5, (4, 5), {0: "a"}, None),  # its own one has not registered yet
        (None, (), {0: "a", 1: "b"}, None),
        (None, (), {}, None),
    ],
)
def test_a_replica_of_several_ranks_is_the_engine_of_its_own_one(
    dp_rank: int | None, ranks: tuple[int, ...], ids: dict[int, str], engine_id: str | None
) -> None:
    member = Member("r0", "http://r0", dp_rank=dp_rank, facts=EngineFacts(ranks=ranks))
    assert engine_id_of(ids, member) == engine_id


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"0": 1}', b'{"x": {"engine_id": "a"}}', b'{"0": {"engine_id": 1}}']
)
def test_an_answer_that_is_none_names_no_engine(body: bytes) -> None:
    assert parse_engines(body) == {}


@pytest.mark.parametrize("now", ["life2 ready", "life1 dead", "life1 hung"])
async def test_an_engine_that_is_gone_pushes_nothing_any_more(now: str) -> None:
    pairs, is_taken = MooncakePairs(known_of(Servers())), asyncio.Event()
    assert await pairs.arrived(leg(now=now), LegAnswer("computed"), is_taken) == "failed"


async def test_a_prompt_that_was_taken_needs_its_engine_no_longer() -> None:
    pairs, is_taken = MooncakePairs(known_of(Servers())), asyncio.Event()
    waiting = asyncio.ensure_future(pairs.arrived(leg(), LegAnswer("computed"), is_taken))
    await asyncio.sleep(0)
    assert not waiting.done()
    is_taken.set()
    assert await waiting == "computed"


async def test_an_answer_that_is_no_stream_needs_the_engine_of_its_prompt_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing shows when its replica has taken the prompt, and it may generate for minutes."""
    monkeypatch.setattr(mooncake, "_LOOK_S", 0.001)
    monkeypatch.setattr(mooncake, "_LEAST_LOOKED_S", 0.0)
    pairs, one = MooncakePairs(known_of(Servers())), leg()
    assert await pairs.arrived(one, LegAnswer("computed"), asyncio.Event()) == "computed"
