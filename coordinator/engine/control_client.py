"""Control requests to replicas over httpx: status, metrics and other questions of KVGate's own, not clients' requests.

The client uses httpx' transport without httpx' client: no redirects, cookies, proxies or decompression are wanted, and
a request costs a third less CPU time.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import orjson

from coordinator.engine.light_json import parse_answer
from coordinator.engine.sockets import SOCKET_OPTIONS

MAX_ANSWER_BYTES = 2 * 2**20
"""Any parser of such an answer takes less than 50 ms."""


class ControlError(Exception):
    """A replica gave no usable answer: `reason` is refused, timeout, reset or protocol."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class ControlAnswer(NamedTuple):
    """A complete answer. `date` is its Date header; empty if it has none."""

    status: int
    body: bytes
    date: str


@dataclass(slots=True)
class _Origin:
    """The connections to one scheme, host and port."""

    transport: httpx.AsyncHTTPTransport
    needed_until_s: float = 0.0
    """Later no call is under way and no idle connection is kept (monotonic time)."""


class ControlClient:
    """Sends control requests on pooled connections. Create it inside a running loop; `close` it at the end.

    An answer may have MAX_ANSWER_BYTES. Each method raises ControlError, also when `timeout_s` is over before the
    answer is complete.
    """

    def __init__(self, connect_s: float, keep_alive_s: float, api_key: str | None = None) -> None:
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = ssl.create_default_context()
        self._origins: dict[tuple[str, str], _Origin] = {}

    async def get(self, url: str, timeout_s: float, with_key: bool = True) -> ControlAnswer:
        """GET, whatever the answer's status is. It is sent a second time if the connection ends before the answer: a
        replica may close an idle connection while a request is on its way."""
        headers = {"accept": "*/*", **(self._key if with_key else {})}
        return await self._send("GET", url, timeout_s, headers, attempts=2)

    async def get_json(self, url: str, timeout_s: float) -> Any:
        """GET a JSON document; any other answer than a 200 with JSON is an error."""
        return _parsed(f"GET {url}", await self.get(url, timeout_s))

    async def post_json(self, url: str, document: Any, timeout_s: float) -> Any:
        """POST a JSON document; any other answer than a 200 with JSON is an error."""
        headers = {"content-type": "application/json", **self._key}
        answer = await self._send("POST", url, timeout_s, headers, orjson.dumps(document))
        return _parsed(f"POST {url}", answer)

    async def close(self) -> None:
        for origin in self._origins.values():
            await origin.transport.aclose()

    async def _send(
        self, method: str, url: str, timeout_s: float, headers: dict[str, str], content: bytes = b"", attempts: int = 1
    ) -> ControlAnswer:
        try:
            async with asyncio.timeout(timeout_s):
                transport = await self._transport(url, timeout_s)
                extensions = {"timeout": {"connect": self._connect_s}}
                request = httpx.Request(method, url, headers=headers, content=content, extensions=extensions)
                async with _answered(transport, request, attempts) as response:
                    body = await _read(response, f"{method} {url}")
                return ControlAnswer(response.status_code, body, response.headers.get("date", ""))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise self._translated(error, url) from error

    async def _transport(self, url: str, timeout_s: float) -> httpx.AsyncHTTPTransport:
        """Each origin has a transport of its own, because each request checks all idle connections of its transport."""
        parts, now_s = urlsplit(url), time.monotonic()
        parts.port  # noqa: B018  raises ValueError for an impossible one
        origin = self._origins.get((parts.scheme, parts.netloc))
        if origin is None:
            await self._close_unneeded(now_s)
            origin = self._origins[parts.scheme, parts.netloc] = _Origin(
                httpx.AsyncHTTPTransport(
                    verify=self._tls,
                    trust_env=False,
                    limits=httpx.Limits(keepalive_expiry=self._keep_alive_s),
                    socket_options=SOCKET_OPTIONS,
                )
            )
        origin.needed_until_s = max(origin.needed_until_s, now_s + timeout_s + self._keep_alive_s)
        return origin.transport

    async def _close_unneeded(self, now_s: float) -> None:
        for name, origin in list(self._origins.items()):
            if origin.needed_until_s < now_s:
                del self._origins[name]
                await origin.transport.aclose()

    def _translated(self, error: Exception, url: str) -> ControlError:
        detail = str(error) or type(error).__name__
        match error:
            case httpx.ConnectError():
                return ControlError("refused", f"cannot connect to {urlsplit(url).netloc} ({_cause(error)})")
            case httpx.ConnectTimeout():
                host = urlsplit(url).netloc
                return ControlError("refused", f"cannot connect to {host} within {self._connect_s:g} s")
            case TimeoutError():
                return ControlError("timeout", detail)
            case _:
                return ControlError("reset" if _has_ended(error) else "protocol", detail)


@asynccontextmanager
async def _answered(
    transport: httpx.AsyncHTTPTransport, request: httpx.Request, attempts: int
) -> AsyncIterator[httpx.Response]:
    """The head of the answer; its body can be read until the end of the context."""
    while True:
        attempts -= 1
        try:
            response = await transport.handle_async_request(request)
            break
        except httpx.TransportError as error:
            if not attempts or not _has_ended(error):
                raise
    try:
        yield response
    finally:
        await response.aclose()


def _has_ended(error: Exception) -> bool:
    """Whether an established connection ended early. httpx raises RemoteProtocolError for that, and for bytes that are
    not HTTP."""
    if isinstance(error, httpx.RemoteProtocolError):
        return str(error).startswith(("Server disconnected", "peer closed connection"))
    return isinstance(error, httpx.NetworkError | OSError) and not isinstance(error, httpx.ConnectError)


async def _read(response: httpx.Response, asked: str) -> bytes:
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ControlError("protocol", f"{asked} answered more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _parsed(asked: str, answer: ControlAnswer) -> Any:
    try:
        return parse_answer(asked, answer.status, answer.body)
    except ValueError as error:
        raise ControlError("protocol", str(error)) from error


def _cause(error: BaseException) -> str:
    """What the system says of a failed connection, which httpx, httpcore and anyio wrap in errors of their own."""
    innermost = error
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper.exceptions[0] if isinstance(deeper, BaseExceptionGroup) else deeper
        if isinstance(error, OSError) and error.errno:
            innermost = error
    if not isinstance(innermost, OSError) or isinstance(innermost, ssl.SSLError):
        return str(innermost)
    number = innermost.errno or 0
    return (os.strerror(number) if number > 0 else innermost.strerror or str(innermost)).lower()
