"""Which engine a prefill replica is, as its Mooncake bootstrap server says (`GET /query`).

An engine has another id in each life. So the servers are asked again if a replica lives again, if a leg fails, and
after a while, because a quick restart may go unseen. All requests of that time share one question.

The server's port is a label of the replica, because several replicas on one host need several ports, and labels come
wherever replicas come from.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import orjson

from gateway.replicas.fleet import Fleet
from gateway.replicas.member import Member
from gateway.routing.ticket import Ticket
from gateway.settings.base import BOOTSTRAP_PORT_LABEL
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

_PORT: Final = "8998"
"""vLLM's default."""
_ASKED_S: Final = 1.0
_KEPT_S: Final = 10.0
"""Also if there was no answer: a server that is away delays few requests."""

_RANK: Final = re.compile("[0-9]{1,6}")


class Engine(NamedTuple):
    address: str
    """Of its bootstrap server."""
    id: str


class _Question(NamedTuple):
    incarnation: str
    at_s: float
    answer: asyncio.Task[dict[int, str]]
    """Rank → id of its engine; empty if there is no answer."""


class Bootstraps:
    """What one gateway knows of them."""

    def __init__(self, fleet: Fleet, upstream: Upstream, tasks: Tasks) -> None:
        self._fleet, self._upstream, self._tasks = fleet, upstream, tasks
        self._asked: dict[str, _Question] = {}
        """By address."""

    async def engine_of(self, leg: Ticket) -> Engine | None:
        """The engine that computes a leg; None if its server does not tell."""
        member = self._fleet.members.get(leg.replica)
        if member is None:
            return None
        address = _address(leg.url, member)
        ids = await asyncio.shield(self._question(address, leg.incarnation).answer)
        engine_id = engine_id_of(ids, member)
        return None if engine_id is None else Engine(address, engine_id)

    def forget(self, leg: Ticket) -> None:
        """A leg has failed: its engine may have another id now."""
        member = self._fleet.members.get(leg.replica)
        address = _address(leg.url, member) if member is not None else ""
        known = self._asked.get(address)
        if known is not None and known.answer.done() and known.answer.result():
            del self._asked[address]

    def _question(self, address: str, incarnation: str) -> _Question:
        now_s, known = time.monotonic(), self._asked.get(address)
        if known is None or known.incarnation != incarnation or known.at_s + _KEPT_S < now_s:
            self._asked = {each: asked for each, asked in self._asked.items() if asked.at_s + _KEPT_S >= now_s}
            answer = self._tasks.spawn(self._ask(address), "a question to a bootstrap server")
            known = self._asked[address] = _Question(incarnation, now_s, answer)
        return known

    async def _ask(self, address: str) -> dict[int, str]:
        try:
            answer = await self._upstream.get(address, "/query", _ASKED_S, with_key=False)
        except UpstreamError:
            return {}
        return parse_engines(answer.body) if answer.status == 200 else {}


def parse_engines(body: bytes) -> dict[int, str]:
    """Rank → id of its engine, in an answer to `GET /query`; empty if it is none."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    entries = document.items() if isinstance(document, dict) else ()
    told = {rank: entry.get("engine_id") for rank, entry in entries if isinstance(entry, dict)}
    return {int(rank): engine for rank, engine in told.items() if _RANK.fullmatch(rank) and isinstance(engine, str)}


def engine_id_of(ids: dict[int, str], member: Member) -> str | None:
    """The id of a replica's engine. Bootstrap servers count the ranks of one server from 0."""
    ranks = member.facts.ranks
    if member.dp_rank is None or len(ranks) <= 1:
        return next(iter(ids.values())) if len(ids) == 1 else None
    return ids.get(ranks.index(member.dp_rank)) if member.dp_rank in ranks else None


def _address(url: str, member: Member) -> str:
    host = urlsplit(url).hostname or ""
    port = member.labels.get(BOOTSTRAP_PORT_LABEL, _PORT)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
