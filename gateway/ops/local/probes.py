"""Asks gateways and replicas whether they can serve."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from coordinator.engine.sockets import tls_context

_TIMEOUT_S = 2.0
_FAILURES = (httpx.HTTPError, ssl.SSLError)
"""httpx does not wrap the error of a server that wants a certificate, and tells so only when it is read from."""


@dataclass(frozen=True)
class ProbeAnswer:
    """A server's answer. All but `problem` comes from gateways."""

    problem: str | None = None
    """Why it cannot serve; None if it can."""
    store: str | None = None
    """The state of the gateway's store."""
    exact: frozenset[str] = frozenset()
    """The replicas whose agents the gateway hears."""
    draining: frozenset[str] = frozenset()
    """The replicas that are drained."""
    asleep: frozenset[str] = frozenset()
    """The replicas whose engines sleep or are paused."""
    store_warnings: tuple[str, ...] = ()
    """Warnings about Redis, from the gateway that watches it."""
    taken_ids: tuple[str, ...] = ()
    """Replicas whose id another engine uses in the same Redis."""


def client(tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """A client for gateways and replicas, which ignores the proxies in the environment. `tls` is for replicas that want
    a certificate."""
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls or tls_context())


async def ask_gateway(http: httpx.AsyncClient, url: str) -> ProbeAnswer:
    try:
        response = await http.get(f"{url}/ready")
        body = response.json()
        store, reasons = body.get("store"), body.get("reasons") or [f"/ready answered {response.status_code}"]
        exact, draining, asleep = (frozenset(body.get(each) or ()) for each in ("exact", "draining", "asleep"))
        warnings = tuple(map(str, body.get("store_warnings") or ()))
        taken = tuple(f"{replica}: {said}" for replica, said in (body.get("taken_ids") or {}).items())
    except _FAILURES as error:
        return ProbeAnswer(f"no answer on {url} ({_cause(error)})")
    except (ValueError, AttributeError):
        return ProbeAnswer(f"/ready on {url} answered {response.status_code}, but not like a gateway")
    problem = None if response.status_code == 200 else ", ".join(map(str, reasons))
    return ProbeAnswer(problem, store, exact, draining, asleep, warnings, taken)


async def ask_replica(http: httpx.AsyncClient, url: str) -> ProbeAnswer:
    """Whether a simulated replica is healthy."""
    try:
        response = await http.get(f"{url}/health")
    except _FAILURES as error:
        return ProbeAnswer(f"no answer on {url} ({_cause(error)})")
    return ProbeAnswer(None if response.status_code == 200 else f"/health answered {response.status_code}")


async def ask_any_server(http: httpx.AsyncClient, url: str) -> ProbeAnswer:
    """Whether the server speaks HTTP: a fronted server need not have /health."""
    try:
        await http.get(url)
    except _FAILURES as error:
        return ProbeAnswer(f"no answer on {url} ({_cause(error)})")
    return ProbeAnswer()


async def refusal(url: str) -> str | None:
    """Why the server cannot be connected to: nothing listens, or its name is unknown. None if it can be, or if that is
    not known after a timeout."""
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
    """Whether an engine lists addresses of KV events (vLLM >= 0.32 does); None if it does not answer."""
    try:
        sources = (await http.get(f"{url}/kv_event_sources")).json()
        return any(source.get("publisher") == "zmq" for source in sources.values())
    except _FAILURES:
        return None
    except (ValueError, AttributeError):
        return False


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
