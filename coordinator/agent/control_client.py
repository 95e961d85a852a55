"""The agent's requests to its engine and to the LMCache server beside it, over httpx."""

from __future__ import annotations

import asyncio
import os
import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from coordinator.engine.light_json import parse_answer
from coordinator.engine.sockets import CONNECT_S, KEEP_ALIVE_S, SOCKET_OPTIONS, tls_context

MAX_ANSWER_BYTES = 2 * 2**20
"""Any parser of such an answer takes less than 50 ms."""


class ControlError(Exception):
    """A server gave no usable answer."""


class ControlClient:
    """Sends requests on pooled connections. Create it inside a running loop; `close` it at the end.

    Each method raises ControlError, also if the answer is larger than MAX_ANSWER_BYTES, or not complete within
    `timeout_s`.
    """

    def __init__(self, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                verify=tls or tls_context(),
                limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
                socket_options=SOCKET_OPTIONS,
                trust_env=False,
            ),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # a server's cookie could pin the agent to it
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
        )

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """The status and body of an answer, whatever they are.

        The request is sent again if its connection ends before the answer is complete: a server may close an idle
        connection while a request is on its way.
        """
        return await self._send("GET", url, timeout_s)

    async def get_json(self, url: str, timeout_s: float) -> Any:
        """A JSON document. Any other answer than a 200 with JSON is an error."""
        return _parsed(f"GET {url}", *await self.get(url, timeout_s))

    async def post_json(self, url: str, document: Any, timeout_s: float) -> Any:
        """The JSON answer to a JSON document. Any other answer than a 200 with JSON is an error."""
        return _parsed(f"POST {url}", *await self._send("POST", url, timeout_s, json=document))

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, method: str, url: str, timeout_s: float, json: Any = None) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._send_once(method, url, json)
                except (httpx.RemoteProtocolError, httpx.ReadError):
                    if method != "GET":
                        raise
                return await self._send_once(method, url, json)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # OSError: TimeoutError, too
            raise ControlError(f"{method} {url}: {_cause(error)}") from error

    async def _send_once(self, method: str, url: str, json: Any) -> tuple[int, bytes]:
        body = bytearray()
        async with self._http.stream(method, url, json=json) as response:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise ControlError(f"{method} {url} answered more than {MAX_ANSWER_BYTES} bytes")
        return response.status_code, bytes(body)


def _parsed(asked: str, status: int, body: bytes) -> Any:
    try:
        return parse_answer(asked, status, body)
    except ValueError as error:
        raise ControlError(str(error)) from error


def _cause(error: BaseException) -> str:
    """The words of the system, if it has any: httpx, httpcore and anyio wrap its errors in their own."""
    system = ""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, ssl.SSLError):  # its number is OpenSSL's
            return str(inner)
        if isinstance(inner, OSError) and inner.errno and inner.errno > 0:
            system = os.strerror(inner.errno).lower()
        inner = inner.__cause__ or inner.__context__
    return system or str(error) or type(error).__name__
