"""Requests to replicas: those of clients, which must be cheap, and those for control, which aiohttp sends.

Each call sends a request once. The caller decides whether to try another replica, which is possible until it has read
the first byte of an answer's body.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from coordinator.engine.light_json import MAX_CONTAINERS, is_light
from coordinator.engine.sockets import new_socket
from gateway.deadlines import Deadlines
from gateway.settings.limit_settings import TimeoutSettings
from gateway.upstream.answer import Answer
from gateway.upstream.connection import Buffer
from gateway.upstream.errors import UpstreamError
from gateway.upstream.origin import Origin

Headers = Mapping[str, str]
MAX_CONTROL_BYTES = 2 * 2**20
"""Of an answer to a control request. Reading that much takes less than 50 ms, whatever its content."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Upstream:
    """Pooled connections to all replicas. Create it inside a running loop, and `close` it at the end."""

    def __init__(self, timeouts: TimeoutSettings, api_key: str | None) -> None:
        self._key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._key_line = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._origins: dict[str, Origin] = {}
        self._kept: frozenset[str] | None = None
        """The replicas whose connections are kept for the next request; None means all."""
        self._connect_s = timeouts.connect_s
        self._keep_alive_s = timeouts.upstream_keep_alive_s
        self._idle_s = timeouts.idle_s
        self._deadlines = Deadlines()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=timeouts.upstream_keep_alive_s,
                ttl_dns_cache=30,
                socket_factory=new_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # no request asks for compression
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(self, method: str, url: str, target: str, headers: Headers, body: Sequence[Buffer] = ()) -> Answer:
        """Send one request to the replica at `url`, and wait for its answer's head. `target` (path and query) and the
        pieces of the body are sent unchanged. Raises UpstreamError."""
        origin = self._origins.get(url) or self._new_origin(url)
        lines = [f"{method} {origin.path_prefix}{target} HTTP/1.1\r\nhost: {origin.host_header}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        lines.append(self._key_line)
        body_bytes = sum(map(len, body))
        if body_bytes or method in _WITH_BODY:
            lines.append(f"content-length: {body_bytes}\r\n")
        lines.append("\r\n")
        connection = await origin.acquire()
        head = "".join(lines).encode("latin-1")
        answer = connection.send(head, body, method == "HEAD", self._deadlines, self._idle_s)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def _new_origin(self, url: str) -> Origin:
        origin = Origin(url, self._connect_s, self._keep_alive_s)
        if self._kept is None or url in self._kept:
            self._origins[url] = origin
        else:  # the request was placed just before the replica went
            origin.retire()
        return origin

    def keep_only(self, urls: Iterable[str]) -> None:
        """From now on, keep connections to these replicas only. Running requests to others finish."""
        self._kept = frozenset(urls)
        for url in self._origins.keys() - self._kept:
            self._origins.pop(url).retire()

    async def fetch(self, url: str, timeout_s: float, with_key: bool = True) -> tuple[int, bytes]:
        """GET for control: the status and body, within `timeout_s`. Raises UpstreamError."""
        status, body, _ = await self.fetch_dated(url, timeout_s, with_key)
        return status, body

    async def fetch_dated(self, url: str, timeout_s: float, with_key: bool) -> tuple[int, bytes, str]:
        """Like `fetch`, with the answer's Date header; empty if it has none."""
        headers = {"accept": "*/*", **(self._key if with_key else {})}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(url, allow_redirects=False, headers=headers) as response,
            ):
                return response.status, await _read(response), response.headers.get("date", "")
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise _translated(error) from error

    async def fetch_json(self, url: str, timeout_s: float) -> Any:
        """GET a JSON document. Raises UpstreamError for anything but a 200 with JSON."""
        status, body = await self.fetch(url, timeout_s)
        return _parsed(f"GET {url}", status, body)

    async def post_json(self, url: str, document: Any, timeout_s: float) -> Any:
        """POST a JSON document for control. Raises UpstreamError for anything but a 200 with JSON."""
        headers = {"content-type": "application/json", **self._key}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(
                    url, data=orjson.dumps(document), allow_redirects=False, headers=headers
                ) as response,
            ):
                return _parsed(f"POST {url}", response.status, await _read(response))
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise _translated(error) from error

    async def close(self) -> None:
        for origin in self._origins.values():
            origin.close()
        await self._session.close()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_CONTROL_BYTES:
            response.close()
            asked = f"{response.method} {response.url}"
            raise UpstreamError("protocol", f"{asked} answered more than {MAX_CONTROL_BYTES} bytes")
    return bytes(body)


def _parsed(asked: str, status: int, body: bytes) -> Any:
    if status != 200:
        raise UpstreamError("protocol", f"{asked} answered {status}{_hint(status)}")
    if not is_light(body):
        raise UpstreamError("protocol", f"{asked} answered JSON of more than {MAX_CONTAINERS} objects and lists")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("protocol", f"{asked} answered something else than JSON") from error


def _hint(status: int) -> str:
    return ": it wants an API key, give it as KVGATE_REPLICA_API_KEY" if status in (401, 403) else ""


def _translated(error: Exception) -> UpstreamError:
    detail = str(error) or type(error).__name__
    match error:
        case aiohttp.ClientConnectorError() if not isinstance(error, aiohttp.ClientSSLError):
            # aiohttp's message mentions TLS without reason, and names the failed call instead of its error.
            cause, number = error.os_error, error.os_error.errno or 0
            why = os.strerror(number) if number > 0 else cause.strerror or str(cause)
            return UpstreamError("refused", f"cannot connect to {error.host}:{error.port} ({why.lower()})")
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return UpstreamError("refused", detail)
        case TimeoutError():
            return UpstreamError("timeout", detail)
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | aiohttp.ClientPayloadError() | OSError():
            return UpstreamError("reset", detail)
        case _:
            return UpstreamError("protocol", detail)
