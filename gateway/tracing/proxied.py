"""The way of a batch of spans through the proxy that the environment names."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx

from coordinator.engine.sockets import CONNECT_S, tls_context
from gateway.tracing.backend import SENDS_WITHIN_S, NotSent, late

_TIMEOUTS = httpx.Timeout(None, connect=CONNECT_S)
_RETRIED = httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError
_MOST_REASON_CHARS = 200

httpx.AsyncClient(verify=tls_context(), trust_env=False)  # imports more, now and not when the first batch leaves


async def post(url: str, trusts: ssl.SSLContext | None, headers: Mapping[str, str], body: bytes) -> int:
    """The way through a proxy: see backend.Post."""
    status = 0
    try:
        async with (
            asyncio.timeout(SENDS_WITHIN_S),
            httpx.AsyncClient(verify=trusts or tls_context(), timeout=_TIMEOUTS) as client,
            client.stream("POST", url, content=body, headers=headers) as answer,
        ):
            status = answer.status_code
    except Exception as error:  # also what a bad proxy in the environment raises
        if not status:
            raise _not_sent(error) from None
    return status


def _not_sent(error: Exception) -> NotSent:
    if isinstance(error, TimeoutError):
        return late()
    why = f": {error}"[:_MOST_REASON_CHARS] if isinstance(error, httpx.ConnectError) else ""
    return NotSent(type(error).__name__ + why, is_final=not isinstance(error, _RETRIED))
