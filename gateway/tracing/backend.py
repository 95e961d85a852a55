"""The way of a batch of spans to the backend, over HTTP/1.1.

It is that of requests to replicas: its code is in the CPU's caches, and nothing has to be imported. If the environment
names a proxy, httpx goes through it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from gateway.settings.limit_settings import TimeoutSettings
from gateway.upstream import Upstream, UpstreamError

if TYPE_CHECKING:
    import httpx

_CONNECTS_WITHIN_S = 2.0
SENDS_WITHIN_S = 5.0
_READS_WITHIN_S = 1.0
_KEPT_S = 1.0
"""A connection, for the next of several batches. Backends close idle ones after some seconds."""
_MOST_REASON_CHARS = 200
_MOST_ANSWER_BYTES = 65_536
_SAFE_IN_PATH = "/%:@!$&'()*+,;="


class NotSent(Exception):
    """A batch was not taken. `reason` has no text of the backend."""

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.reason = reason[:_MOST_REASON_CHARS]
        self.is_final = is_final
        """To send it again would not help, or the backend may have it."""


class Backend(Protocol):
    """Connections to a backend."""

    async def post(self, headers: Mapping[str, str], body: bytes) -> int:
        """Send a batch, and return the status of the answer. Raises NotSent if there is none."""
        ...

    async def close(self) -> None: ...


def backend(endpoint: str, trusts: ssl.SSLContext | None) -> Backend:
    """The way to this address. `trusts` is for https."""
    proxies = getproxies()
    if {urlsplit(endpoint).scheme, "all"} & proxies.keys():
        return _Proxied(endpoint, trusts)
    return _Direct(endpoint, trusts)


class _Direct:
    def __init__(self, endpoint: str, trusts: ssl.SSLContext | None) -> None:
        parts = urlsplit(endpoint)
        self._address, self._target = f"{parts.scheme}://{parts.netloc}", quote(parts.path or "/", safe=_SAFE_IN_PATH)
        timeouts = TimeoutSettings(connect_s=_CONNECTS_WITHIN_S, upstream_keep_alive_s=_KEPT_S)
        self._upstream = Upstream(timeouts, None, lambda: trusts) if trusts else Upstream(timeouts, None)

    async def post(self, headers: Mapping[str, str], body: bytes) -> int:
        try:
            async with asyncio.timeout(SENDS_WITHIN_S):
                answer = await self._upstream.send("POST", self._address, self._target, headers, [body])
        except TimeoutError:
            raise _late() from None
        except UpstreamError as error:  # who got no connection tries again; otherwise the backend may have the batch
            raise NotSent(str(error), is_final=error.reason != "refused") from None
        try:  # so that the connection can be used again
            with suppress(UpstreamError, TimeoutError):
                async with asyncio.timeout(_READS_WITHIN_S):
                    await answer.gathered(_MOST_ANSWER_BYTES, lambda _size_bytes: True)
        finally:
            answer.close()
        return answer.status

    async def close(self) -> None:
        await self._upstream.close()


class _Proxied:
    def __init__(self, endpoint: str, trusts: ssl.SSLContext | None) -> None:
        self._endpoint = endpoint
        self._trusts = trusts
        self._client: httpx.AsyncClient | None = None

    async def post(self, headers: Mapping[str, str], body: bytes) -> int:
        import httpx

        retried = httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError
        try:
            async with asyncio.timeout(SENDS_WITHIN_S):
                self._client = self._client or self._new_client()
                sent = self._client.stream("POST", self._endpoint, content=body, headers=headers)
                async with sent as answer:
                    return answer.status_code  # an answer may have no end
        except TimeoutError:
            raise _late() from None
        except Exception as error:  # also what a bad proxy in the environment raises
            why = f": {error}" if isinstance(error, httpx.ConnectError) else ""
            raise NotSent(type(error).__name__ + why, is_final=not isinstance(error, retried)) from None

    def _new_client(self) -> httpx.AsyncClient:
        import httpx

        timeouts = httpx.Timeout(None, connect=_CONNECTS_WITHIN_S)
        return httpx.AsyncClient(verify=self._trusts or True, timeout=timeouts)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _late() -> NotSent:
    return NotSent(f"no answer within {SENDS_WITHIN_S:g} s", is_final=True)
