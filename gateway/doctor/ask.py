"""Asking replicas, gateways and LMCache servers over HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import msgspec
import orjson

from coordinator.engine.facts import base_card, cache_settings, parse_metrics, parse_models
from coordinator.engine.kv_transfers import parse_transfers
from coordinator.keys import pool_slug
from gateway.doctor.event_endpoints import open_ones
from gateway.doctor.evidence import GatewayEvidence, LmcacheEvidence, ReplicaEvidence, Unknown
from gateway.settings.base import ROLE_LABEL
from gateway.upstream import ControlAnswer, Upstream, UpstreamError

_OK, _SERVER_ERRORS = 200, 500
_Parsed = TypeVar("_Parsed")
_PROMPT = "The doctor asks which keys this prompt has. " * 40
_FORBIDDEN = (401, 403)


# -- replicas --------------------------------------------------------------------------------------------------------


async def ask_replica(
    upstream: Upstream, replica: ReplicaEvidence, with_key: bool, timeout_s: float
) -> ReplicaEvidence:
    """Ask a replica everything at once: one that hangs costs one timeout. Only configured replicas get the key."""
    paths = ("/health", "/version", "/v1/models", "/metrics", "/kv_event_sources")
    health, version, models, metrics, sources = await asyncio.gather(
        *(_get(upstream, replica.url, path, with_key, timeout_s) for path in paths)
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
        transfers=_read(metrics, "/metrics", lambda body: parse_transfers(body.decode("utf-8", "replace"))),
        started="" if isinstance(started, Unknown) else started,
        endpoints=endpoints,
        open_endpoints=({} if isinstance(endpoints, Unknown) else await open_ones(endpoints, replica.url, timeout_s)),
    )


def endpoints_in(sources: Any) -> tuple[str, ...]:
    """The endpoints of every rank, from the answer of /kv_event_sources."""
    publishers = [source for source in sources.values() if source.get("publisher") == "zmq"]
    found = (source.get(name) for source in publishers for name in ("endpoint", "replay_endpoint"))
    return tuple(dict.fromkeys(endpoint for endpoint in found if endpoint))


async def _get(upstream: Upstream, url: str, path: str, with_key: bool, timeout_s: float) -> ControlAnswer | Unknown:
    try:
        return await upstream.get(url, path, timeout_s, with_key)
    except UpstreamError as error:
        return Unknown(f"no answer within {timeout_s:g} s" if error.reason == "timeout" else str(error))


def _read(page: ControlAnswer | Unknown, path: str, parse: Callable[[bytes], _Parsed]) -> _Parsed | Unknown:
    if isinstance(page, Unknown):
        return Unknown(f"{path}: {page.why}")
    if page.status in (401, 403):
        return Unknown(
            f"{path} needs an API key: give KVGATE_REPLICA_API_KEY, and --config, which says which replicas may get it"
        )
    if page.status != _OK:
        return Unknown(f"{path} answered {page.status}: this vLLM is too old for it, or it is not vLLM")
    try:
        return parse(page.body)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Unknown(f"{path} does not answer as vLLM does")


# -- gateways and LMCache servers ------------------------------------------------------------------------------------


class NotAnswered(Exception):
    """A server gave no usable answer."""


async def ask_gateway(http: httpx.AsyncClient, url: str, timeout_s: float) -> GatewayEvidence:
    """Ask a gateway about itself."""
    try:
        (_, ready), (_, about) = await asyncio.gather(
            *(_json(http, "GET", f"{url}{path}", timeout_s) for path in ("/ready", "/version"))
        )
        return gateway_evidence(url, ready, about)
    except NotAnswered as error:
        return GatewayEvidence(url=url, problem=str(error))
    except (AttributeError, LookupError, TypeError, ValueError):
        return GatewayEvidence(url=url, problem=f"{url}/ready does not answer as a gateway does")


def gateway_evidence(url: str, ready: dict[str, Any], about: dict[str, Any]) -> GatewayEvidence:
    """What a gateway's /ready and /version say. Raises AttributeError, LookupError, TypeError or ValueError if
    no gateway says that."""
    told = ready | {
        "url": url,
        "id": ready["gateway"],
        "version": about["version"],
        "settings": about.get("settings", {}),
        "is_ready": ready["ready"],
        "store_problem": ready.get("store_problem") or "",
        "store_warnings": dict(zip(ready.get("store_conditions", ()), ready.get("store_warnings", ()), strict=False)),
        "answered_by": ready.get("answered_by_fallback", {}),
        "unknown_fallbacks": ready.get("unknown_fallbacks", {}),
        "roles": {name: each[ROLE_LABEL] for name, each in ready.get("labels", {}).items() if ROLE_LABEL in each},
        "several_pools": ready.get("models_in_several_pools", {}),
        "models": list(ready.get("models", ())),
        "without_replicas": ready.get("backends_without_replicas", {}),
        "are_weights_approximate": ready.get("weights") == "approximate",
    }
    return msgspec.convert(told, GatewayEvidence)


async def with_keys(
    http: httpx.AsyncClient,
    gateways: tuple[GatewayEvidence, ...],
    model: str | None,
    api_key: str | None,
    timeout_s: float,
) -> tuple[GatewayEvidence, ...]:
    """The gateways, each with the keys that it gives to the same prompt for `model`."""

    async def ask(gateway: GatewayEvidence) -> GatewayEvidence:
        if gateway.problem:
            return gateway
        keys = Unknown("no replica names the models that it serves") if model is None else await explain(gateway.url)
        return replace(gateway, keys=keys)

    async def explain(url: str) -> tuple[str, ...] | Unknown:
        body = {"model": model, "messages": [{"role": "user", "content": _PROMPT}]}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            status, answer = await _json(http, "POST", f"{url}/v1/route/explain", timeout_s, json=body, headers=headers)
            if status in _FORBIDDEN:
                return Unknown("it shows its decisions to admins only: give an admin key as KVGATE_API_KEY")
            return tuple(str(key["key"]) for key in answer["chain"])
        except NotAnswered as error:
            return Unknown(str(error))
        except (LookupError, TypeError):
            return Unknown(f"/v1/route/explain answered {status} for model {model}")

    return tuple(await asyncio.gather(*map(ask, gateways)))


async def ask_lmcache(http: httpx.AsyncClient, url: str, timeout_s: float) -> LmcacheEvidence:
    """Ask an LMCache server about its chunks."""
    try:
        status, said = await _json(http, "GET", f"{url}/status", timeout_s)
        if said.get("is_healthy") is not True:
            return LmcacheEvidence(url, f"/status answered {status}, and not that it is healthy")
        return LmcacheEvidence(url, "", str(said["chunk_size"]), str(said["hash_algorithm"]))
    except NotAnswered as error:
        return LmcacheEvidence(url, str(error))
    except (LookupError, AttributeError):
        return LmcacheEvidence(url, "/status does not answer as `lmcache server` does")


async def _json(http: httpx.AsyncClient, method: str, url: str, timeout_s: float, **content: Any) -> tuple[int, Any]:
    try:
        async with asyncio.timeout(timeout_s):
            response = await http.request(method, url, **content)
            return response.status_code, response.json()
    except TimeoutError:
        raise NotAnswered(f"{url} does not answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        why = str(error) or repr(error.__cause__ or error)
        raise NotAnswered(f"no answer from {url} ({why})") from None
    except ValueError:
        raise NotAnswered(f"{url} answered {response.status_code}, without JSON") from None
