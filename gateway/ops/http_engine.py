"""An agent's view of its engine over HTTP: which life it lives, where it publishes KV events, how busy it is."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from coordinator.agent.chunkbook import ChunkTier
from coordinator.agent.engine_snapshot import EngineAway, EngineSnapshot
from coordinator.engine.facts import base_card, parse_metrics, parse_models
from coordinator.engine.lmcache_server import parse_speeds, parse_tier
from coordinator.keys import pool_slug
from gateway.upstream import Upstream, UpstreamError

_TIMEOUT_S = 2.0
_OK = 200
_SERVER_ERRORS = 500
_NUMBERS = re.compile(r"\d+")
_LMCACHE_TIMEOUT_S = 1.0
_LMCACHE_EVERY_S = 5.0


class HttpEngine:
    """One replica's engine. Endpoints that are given are used; others are asked of the engine (vLLM >= 0.32). `lmcache`
    is the HTTP address of the LMCache server beside it, where there is one."""

    def __init__(
        self,
        upstream: Upstream,
        url: str,
        dp_rank: int | None = None,
        events: str = "",
        replay: str = "",
        lmcache: str = "",
    ) -> None:
        self._upstream = upstream
        self._url = url
        self._dp_rank = dp_rank
        self._given = (events, replay)
        self._lmcache = lmcache
        self._model = ""
        self._root = ""
        self._tier: ChunkTier | None = None
        self._speeds: dict[str, float] = {}
        self._tier_due_s = 0.0
        self._life: tuple[str, str, tuple[int, ...], str, str] | None = None
        """What is asked once in a life: (its start, pool, version, events, replay)."""

    async def look(self) -> EngineSnapshot:
        """Raises EngineAway."""
        try:
            _, text = await self._fetch("/metrics")
            facts = parse_metrics(text.decode("utf-8", "replace"), self._dp_rank)
            if self._life is None or self._life[0] != facts.started or not facts.started:
                self._life = await self._ask_life(facts.started)
        except UpstreamError as error:
            raise EngineAway(f"{self._url}: {error}") from error
        started, pool, version, events, replay = self._life
        if self._lmcache and time.monotonic() >= self._tier_due_s:
            await self._look_at_lmcache()
        return EngineSnapshot(
            pool=pool,
            url=self._url,
            started=started,
            capacity_tokens=facts.capacity_tokens,
            block_size=facts.block_size,
            version=version,
            events=events,
            replay=replay,
            waiting=int(facts.figures.get("waiting", 0)),
            counters=facts.figures | self._speeds,
            tier=self._tier,
        )

    async def _look_at_lmcache(self) -> None:
        """Now and then; a server that is away has not changed how it names chunks."""
        self._tier_due_s = time.monotonic() + _LMCACHE_EVERY_S
        try:
            status, config, (_, text) = await asyncio.gather(
                self._upstream.fetch_json(self._lmcache + "/status", _LMCACHE_TIMEOUT_S),
                self._upstream.fetch_json(self._lmcache + "/config", _LMCACHE_TIMEOUT_S),
                self._upstream.fetch(self._lmcache + "/metrics", _LMCACHE_TIMEOUT_S),
            )
        except UpstreamError:
            return
        self._tier = parse_tier(status, config, self._root) or self._tier
        self._speeds = parse_speeds(text.decode("utf-8", "replace"))

    async def detokenize(self, tokens: Sequence[int]) -> str | None:
        """The text of a sequence of tokens; None where the engine does not tell."""
        try:
            asked = {"model": self._model, "tokens": list(tokens)}
            answer = await self._upstream.post_json(self._url + "/detokenize", asked, _TIMEOUT_S)
        except UpstreamError:
            return None
        text = answer.get("prompt") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    async def _ask_life(self, started: str) -> tuple[str, str, tuple[int, ...], str, str]:
        cards = parse_models(await self._upstream.fetch_json(self._url + "/v1/models", _TIMEOUT_S))
        base = base_card(cards)
        if base is None:
            raise UpstreamError("protocol", "/v1/models lists no model")
        self._model, self._root = base.id, base.root
        events, replay = self._given
        if not events:
            events, replay = event_endpoints(await self._optional("/kv_event_sources"), self._url, self._dp_rank)
        version = _version(await self._optional("/version"))
        return started, pool_slug(base.root), version, events, replay

    async def _optional(self, path: str) -> Any:
        """None from a server that is older than the path, or is none of vLLM's; one that fails is away."""
        status, body = await self._fetch(path)
        try:
            return orjson.loads(body) if status == _OK else None
        except orjson.JSONDecodeError:
            return None

    async def _fetch(self, path: str) -> tuple[int, bytes]:
        status, body = await self._upstream.fetch(self._url + path, _TIMEOUT_S)
        if status >= _SERVER_ERRORS:
            raise UpstreamError("protocol", f"GET {path} answered {status}")
        return status, body


def event_endpoints(sources: Any, url: str, dp_rank: int | None) -> tuple[str, str]:
    """Where a rank publishes and replays, of what /kv_event_sources said (rank -> publisher's configuration); wildcards
    become the replica's host."""
    source = sources.get(str(dp_rank or 0)) if isinstance(sources, dict) else None
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
