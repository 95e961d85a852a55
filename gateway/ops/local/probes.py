"""Asks gateways and replicas whether they can serve."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from coordinator.engine.sockets import tls_context

_TIMEOUT_S = 2.0
_FAILURES = (httpx.HTTPError, ssl.SSLError)
"""httpx does not wrap the error of a server that wants a certificate, and tells so only when it is read from."""


@dataclass(frozen=True)
class GatewayAnswer:
    """Why a gateway cannot serve (None if it can), and what its /ready says."""

    problem: str | None
    ready: Mapping[str, Any] = field(default_factory=dict)


def client(tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """A client for gateways and replicas, which ignores the proxies in the environment. `tls` is for replicas that want
    a certificate."""
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls or tls_context())


async def ask_gateway(http: httpx.AsyncClient, url: str) -> GatewayAnswer:
    try:
        response = await http.get(f"{url}/ready")
        ready = response.json()
        problem = None if response.status_code == 200 else ", ".join(map(str, ready["reasons"]))
        return GatewayAnswer(problem, {"store": ready["store"], **ready})
    except _FAILURES as error:
        return GatewayAnswer(f"no answer on {url} ({_cause(error)})")
    except (ValueError, LookupError, TypeError):
        return GatewayAnswer(f"/ready on {url} answered {response.status_code}, but not like a gateway")


async def problem_of(http: httpx.AsyncClient, url: str, *, is_simulated: bool = True) -> str | None:
    """Why a replica cannot serve; None if it can. A server that was there before need not have /health."""
    try:
        response = await http.get(f"{url}/health" if is_simulated else url)
    except _FAILURES as error:
        return f"no answer on {url} ({_cause(error)})"
    return f"/health answered {response.status_code}" if is_simulated and response.status_code != 200 else None


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
