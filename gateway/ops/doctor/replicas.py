"""Asking replicas: everything that one tells, at once, so that one which hangs costs one timeout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import orjson

from coordinator.engine.facts import base_card, cache_settings, parse_metrics, parse_models
from coordinator.keys import pool_slug
from gateway.ops.doctor.endpoints import open_ones
from gateway.ops.doctor.evidence import ReplicaEvidence, Span, Unknown
from gateway.upstream import Upstream, UpstreamError

_OK, _SERVER_ERRORS = 200, 500
_DATE_STEP_S = 2.0
"""A Date header is in whole seconds, and servers write it anew once a second."""
_Parsed = TypeVar("_Parsed")


async def ask_replica(
    upstream: Upstream, replica: ReplicaEvidence, with_key: bool, timeout_s: float
) -> ReplicaEvidence:
    """What it says of itself. The key for replicas goes only to those that the configuration names."""
    paths = ("/health", "/version", "/v1/models", "/metrics", "/kv_event_sources")
    health, version, models, metrics, sources = await asyncio.gather(
        *(_get(upstream, replica.url + path, with_key, timeout_s) for path in paths)
    )
    if isinstance(health, Unknown):
        return replace(replica, problem=health.why, answers=False)
    cards = _read(models, "/v1/models", lambda body: tuple(parse_models(orjson.loads(body))))
    endpoints = _read(sources, "/kv_event_sources", lambda body: endpoints_in(orjson.loads(body)))
    base = None if isinstance(cards, Unknown) else base_card(list(cards))
    started = _read(metrics, "/metrics", lambda body: parse_metrics(body.decode("utf-8", "replace"), None).started)
    return replace(
        replica,
        pool=replica.pool or (pool_slug(base.root) if base else ""),
        problem=f"/health answered {health.status}" if health.status >= _SERVER_ERRORS else "",
        version=_read(version, "/version", lambda body: str(orjson.loads(body)["version"])),
        cards=cards,
        cache=_read(metrics, "/metrics", lambda body: cache_settings(body.decode("utf-8", "replace"))),
        started="" if isinstance(started, Unknown) else started,
        endpoints=endpoints,
        open_endpoints=({} if isinstance(endpoints, Unknown) else await open_ones(endpoints, replica.url, timeout_s)),
        clock_ahead_s=health.clock_ahead_s,
    )


def endpoints_in(sources: Any) -> tuple[str, ...]:
    """Every rank's endpoints, of what /kv_event_sources said."""
    publishers = [source for source in sources.values() if source.get("publisher") == "zmq"]
    found = (source.get(name) for source in publishers for name in ("endpoint", "replay_endpoint"))
    return tuple(dict.fromkeys(endpoint for endpoint in found if endpoint))


class _Page:
    def __init__(self, status: int, body: bytes, clock_ahead_s: Span | None) -> None:
        self.status = status
        self.body = body
        self.clock_ahead_s = clock_ahead_s


async def _get(upstream: Upstream, url: str, with_key: bool, timeout_s: float) -> _Page | Unknown:
    asked_s = time.time()
    try:
        status, body, date = await upstream.fetch_dated(url, timeout_s, with_key)
    except UpstreamError as error:
        return Unknown(f"no answer within {timeout_s:g} s" if error.reason == "timeout" else str(error))
    return _Page(status, body, _ahead_s(date, asked_s, time.time()))


def _ahead_s(date: str, asked_s: float, answered_s: float) -> Span | None:
    try:
        its_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return its_s - answered_s, its_s + _DATE_STEP_S - asked_s


def _read(page: _Page | Unknown, path: str, parse: Callable[[bytes], _Parsed]) -> _Parsed | Unknown:
    if isinstance(page, Unknown):
        return Unknown(f"{path}: {page.why}")
    if page.status in (401, 403):
        return Unknown(f"{path} wants an API key: give KVGATE_REPLICA_API_KEY, and --config, which says who may get it")
    if page.status != _OK:
        return Unknown(f"{path} answered {page.status}: it is older than that, or not vLLM")
    try:
        return parse(page.body)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Unknown(f"{path} is not what vLLM answers")
