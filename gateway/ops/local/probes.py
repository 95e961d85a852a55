"""Asks gateways and replicas whether they can serve."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ProbeAnswer:
    """What a server said: `problem` is None when it can serve; `store` is a gateway's word on its store, `exact` are
    the replicas whose agents it hears, `store_warnings` what it says of Redis where it is who watches it, and
    `taken_ids` of replicas whose id is another engine's there."""

    problem: str | None = None
    store: str | None = None
    exact: frozenset[str] = frozenset()
    store_warnings: tuple[str, ...] = ()
    taken_ids: tuple[str, ...] = ()


def client() -> httpx.AsyncClient:
    """For requests to this machine: proxies in the environment are for others."""
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)


async def ask_gateway(http: httpx.AsyncClient, url: str) -> ProbeAnswer:
    try:
        response = await http.get(f"{url}/ready")
        body = response.json()
        store, reasons = body.get("store"), body.get("reasons") or [f"/ready answered {response.status_code}"]
        exact = frozenset(body.get("exact") or ())
        warnings = tuple(map(str, body.get("store_warnings") or ()))
        taken = tuple(f"{replica}: {said}" for replica, said in (body.get("taken_ids") or {}).items())
    except httpx.HTTPError as error:
        return ProbeAnswer(f"no answer on {url} ({_cause(error)})")
    except (ValueError, AttributeError):
        return ProbeAnswer(f"/ready on {url} answered {response.status_code}, and not as a gateway does")
    problem = None if response.status_code == 200 else ", ".join(map(str, reasons))
    return ProbeAnswer(problem, store, exact, warnings, taken)


async def ask_replica(http: httpx.AsyncClient, url: str) -> ProbeAnswer:
    """Whether a simulated replica is healthy."""
    try:
        response = await http.get(f"{url}/health")
    except httpx.HTTPError as error:
        return ProbeAnswer(f"no answer on {url} ({_cause(error)})")
    return ProbeAnswer(None if response.status_code == 200 else f"/health answered {response.status_code}")


async def ask_any_server(http: httpx.AsyncClient, url: str) -> ProbeAnswer:
    """Whether anything speaks HTTP there: a fronted server need not know /health."""
    try:
        await http.get(url)
    except httpx.HTTPError as error:
        return ProbeAnswer(f"no answer on {url} ({_cause(error)})")
    return ProbeAnswer()


async def refusal(url: str) -> str | None:
    """Why no connection is to be had, where nothing listens there or the name is unknown; None where one is, or where
    that is not known yet."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None


async def has_events(http: httpx.AsyncClient, url: str) -> bool | None:
    """Whether an engine tells where it publishes KV events (vLLM >= 0.32); None where it does not answer."""
    try:
        sources = (await http.get(f"{url}/kv_event_sources")).json()
        return any(source.get("publisher") == "zmq" for source in sources.values())
    except httpx.HTTPError:
        return None
    except (ValueError, AttributeError):
        return False


def _cause(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
