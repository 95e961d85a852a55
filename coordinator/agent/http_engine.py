"""The agent's view of its engine over HTTP: which process runs there, where it publishes KV events, how busy it is."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from coordinator.agent.control_client import ControlClient, ControlError
from coordinator.engine.facts import base_card, chosen_rank, parse_metrics, parse_models, parse_sleep
from coordinator.engine.lmcache_server import parse_speeds, parse_tier
from coordinator.keys import pool_slug
from coordinator.lmcache_chunks import ChunkTier

_TIMEOUT_S = 2.0
_SLEEP_TIMEOUT_S = 0.5
"""An engine tells between two steps whether it sleeps."""
_OK = 200
_SERVER_ERRORS = 500
_NUMBERS = re.compile(r"\d+")
_LMCACHE_TIMEOUT_S = 1.0
_LMCACHE_EVERY_S = 5.0


class EngineAway(Exception):
    """The engine cannot be reached, or does not answer as an engine does."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine at one moment."""

    pool: str
    url: str
    started: str
    """The start time of its process in hex milliseconds, which serves as its incarnation; empty if it is not told."""
    capacity_tokens: int = 0
    block_size: int = 0
    version: tuple[int, ...] = ()
    """Empty if the engine does not tell it."""
    events: str = ""
    """The ZMQ endpoint of its KV events; empty if it publishes none."""
    replay: str = ""
    waiting: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    """Of the engine, and of the LMCache server beside it: see facts.py and lmcache_server.py in coordinator/engine/."""
    tier: ChunkTier | None = None
    """How the LMCache server keeps chunks in Redis; None without a server."""
    is_asleep: bool | None = None
    """Whether it was put to sleep, or is paused; None if it does not tell."""


class EngineProbe(Protocol):
    """What the agent asks of its engine."""

    async def look(self) -> EngineSnapshot:
        """Raises EngineAway."""
        ...

    async def detokenize(self, tokens: Sequence[int]) -> str | None:
        """The text of a sequence of tokens; None if the engine does not tell."""
        ...


class HttpEngine:
    """The probe of one replica's engine. Event endpoints that are not given are asked of the engine (vLLM >= 0.32).
    `lmcache` is the HTTP address of the LMCache server beside it; empty without one."""

    def __init__(
        self,
        client: ControlClient,
        url: str,
        dp_rank: int | None = None,
        events: str = "",
        replay: str = "",
        lmcache: str = "",
    ) -> None:
        self._client = client
        self._url = url
        self._dp_rank = dp_rank
        self._given = (events, replay)
        self._lmcache = lmcache
        self._model = ""
        self._root = ""
        self._tier: ChunkTier | None = None
        self._speeds: dict[str, float] = {}
        self._tier_due_s = 0.0
        self._life: EngineSnapshot | None = None
        """What stays the same while an engine process lives, and is asked once."""
        self._tells_sleep = False
        """Whether it has /is_sleeping."""
        self._is_asleep: bool | None = None

    async def look(self) -> EngineSnapshot:
        try:
            _, text = await self._get("/metrics")
            facts = parse_metrics(text.decode("utf-8", "replace"), self._dp_rank)
            if contradiction := facts.contradiction(self._dp_rank):
                raise ControlError(contradiction)
            if self._life is None or self._life.started != facts.started or not facts.started:
                self._life = await self._ask_life(facts.started)
            await self._look_whether_asleep(facts.is_asleep)
        except ControlError as error:
            raise EngineAway(f"{self._url}: {error}") from error
        if self._lmcache and time.monotonic() >= self._tier_due_s:
            await self._look_at_lmcache()
        return replace(
            self._life,
            capacity_tokens=facts.capacity_tokens,
            block_size=facts.block_size,
            waiting=int(facts.figures.get("waiting", 0)),
            counters=facts.figures | self._speeds,
            tier=self._tier,
            is_asleep=self._is_asleep,
        )

    async def _look_whether_asleep(self, told: bool | None) -> None:
        """`told`: by its metrics. If an engine is too busy to answer /is_sleeping, its last answer counts. If it
        answers an error, it stops, and is not asked again: vLLM 0.33 never exits while such a question waits."""
        if not self._tells_sleep:
            self._is_asleep = told
            return
        with suppress(ControlError, orjson.JSONDecodeError):
            status, body = await self._client.get(self._url + "/is_sleeping", _SLEEP_TIMEOUT_S)
            if status == _OK:
                self._is_asleep = parse_sleep(orjson.loads(body))
            else:
                self._tells_sleep = False

    async def _look_at_lmcache(self) -> None:
        """Every few seconds. While the server is away, its last answer counts: chunk names do not change."""
        self._tier_due_s = time.monotonic() + _LMCACHE_EVERY_S
        try:
            status, config, (_, metrics) = await asyncio.gather(
                self._client.get_json(self._lmcache + "/status", _LMCACHE_TIMEOUT_S),
                self._client.get_json(self._lmcache + "/config", _LMCACHE_TIMEOUT_S),
                self._client.get(self._lmcache + "/metrics", _LMCACHE_TIMEOUT_S),
            )
        except ControlError:
            return
        self._tier = parse_tier(status, config, self._root) or self._tier
        self._speeds = parse_speeds(metrics.decode("utf-8", "replace"))

    async def detokenize(self, tokens: Sequence[int]) -> str | None:
        try:
            asked = {"model": self._model, "tokens": list(tokens)}
            answer = await self._client.post_json(self._url + "/detokenize", asked, _TIMEOUT_S)
        except ControlError:
            return None
        text = answer.get("prompt") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    async def _ask_life(self, started: str) -> EngineSnapshot:
        cards = parse_models(await self._client.get_json(self._url + "/v1/models", _TIMEOUT_S))
        base = base_card(cards)
        if base is None:
            raise ControlError("/v1/models lists no model")
        self._model, self._root = base.id, base.root
        events, replay = self._given
        if not events:
            events, replay = event_endpoints(await self._optional("/kv_event_sources"), self._url, self._dp_rank)
        version = _version(await self._optional("/version"))
        self._tells_sleep = parse_sleep(await self._optional("/is_sleeping")) is not None
        pool = pool_slug(base.root)
        return EngineSnapshot(pool, self._url, started, version=version, events=events, replay=replay)

    async def _optional(self, path: str) -> Any:
        """The JSON at a path; None if the server does not have it: an older vLLM, or another engine."""
        status, body = await self._get(path)
        try:
            return orjson.loads(body) if status == _OK else None
        except orjson.JSONDecodeError:
            return None

    async def _get(self, path: str) -> tuple[int, bytes]:
        status, body = await self._client.get(self._url + path, _TIMEOUT_S)
        if status >= _SERVER_ERRORS:
            raise ControlError(f"GET {path} answered {status}")
        return status, body


def event_endpoints(sources: Any, url: str, dp_rank: int | None) -> tuple[str, str]:
    """Where a rank publishes and replays events. `sources` is the answer of /kv_event_sources: each rank's publisher
    configuration. A wildcard is replaced by the replica's host."""
    if not isinstance(sources, dict):
        return "", ""
    ranks = [int(rank) for rank in sources if _NUMBERS.fullmatch(rank)]
    source = sources.get(str(chosen_rank(ranks, dp_rank)))
    if not isinstance(source, dict) or source.get("publisher") != "zmq":
        return "", ""
    host = urlsplit(url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    found = (source.get("endpoint"), source.get("replay_endpoint"))
    events, replay = (each.replace("*", host) if isinstance(each, str) else "" for each in found)
    return events, replay


def _version(answer: Any) -> tuple[int, ...]:
    text = answer.get("version") if isinstance(answer, dict) else None
    return tuple(int(part) for part in _NUMBERS.findall(text)[:2]) if isinstance(text, str) else ()
