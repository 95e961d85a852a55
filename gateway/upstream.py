"""The only module that speaks to replicas.

A request is sent once per call: whether to try elsewhere is the caller's decision, and until the first byte of an
answer's body has been read there is always that choice. Connections are reused for less time than vLLM keeps them
open (5 s), so that a request is not sent into one that is being closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from multidict import CIMultiDictProxy
from yarl import URL

from gateway.settings import TimeoutSettings

_READ_AHEAD_BYTES = 2**18


class UpstreamError(Exception):
    """A replica did not answer, or stopped answering: `reason` is refused, reset, timeout or protocol."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Answer:
    """A replica's answer: status and headers are in, the body is still to be read."""

    __slots__ = ("_response", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return self._response.headers

    @property
    def is_event_stream(self) -> bool:
        return self._response.headers.get("content-type", "").startswith("text/event-stream")

    async def next_chunk(self) -> bytes:
        """The next bytes as they came; empty at the end. Raises UpstreamError when the replica breaks off."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error) from error

    async def body(self) -> bytes:
        """The whole body."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error) from error

    def close(self) -> None:
        """Let go of the answer. One not read to its end closes its connection: vLLM then aborts the request."""
        self._response.close()


class Upstream:
    """Pooled connections to all replicas. Make it inside a running loop; `close` it at the end."""

    def __init__(self, timeouts: TimeoutSettings, api_key: str | None) -> None:
        self._key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=timeouts.upstream_keep_alive_s, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_AHEAD_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send one request and wait for the answer's headers; `url` goes out as it stands. Raises UpstreamError."""
        try:
            response = await self._session.request(
                method, URL(url, encoded=True), data=body, headers={**headers, **self._key}, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _translated(error) from error
        return Answer(response)

    async def fetch(self, url: str, timeout_s: float, with_key: bool = True) -> tuple[int, bytes]:
        """GET for control purposes: status and body, within `timeout_s`. Raises UpstreamError."""
        headers = {"accept": "*/*", **(self._key if with_key else {})}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(url, allow_redirects=False, headers=headers) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise _translated(error) from error

    async def fetch_json(self, url: str, timeout_s: float) -> Any:
        """GET a JSON document; anything but a 200 with JSON is an UpstreamError."""
        status, body = await self.fetch(url, timeout_s)
        if status != 200:
            raise UpstreamError("protocol", f"GET {url} answered {status}{_hint(status)}")
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise UpstreamError("protocol", f"GET {url} answered something else than JSON") from error

    async def post_json(self, url: str, document: Any, timeout_s: float) -> Any:
        """POST a JSON document for control purposes; anything but a 200 with JSON is an UpstreamError."""
        headers = {"content-type": "application/json", **self._key}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(
                    url, data=orjson.dumps(document), allow_redirects=False, headers=headers
                ) as response,
            ):
                if response.status != 200:
                    raise UpstreamError("protocol", f"POST {url} answered {response.status}{_hint(response.status)}")
                return orjson.loads(await response.read())
        except orjson.JSONDecodeError as error:
            raise UpstreamError("protocol", f"POST {url} answered something else than JSON") from error
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise _translated(error) from error

    async def close(self) -> None:
        await self._session.close()


def _hint(status: int) -> str:
    return ": it wants an API key, give it as KVGATE_REPLICA_API_KEY" if status in (401, 403) else ""


def _translated(error: Exception) -> UpstreamError:
    detail = str(error) or type(error).__name__
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return UpstreamError("refused", detail)
        case TimeoutError():
            return UpstreamError("timeout", detail)
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | aiohttp.ClientPayloadError() | OSError():
            return UpstreamError("reset", detail)
        case _:
            return UpstreamError("protocol", detail)
