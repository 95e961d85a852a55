"""Sends requests to replicas: those of clients, and the gateway's own (health checks, models, metrics).

A request that meets the end of a kept connection is sent once more, on a new connection: the server closed the kept one
while the request was on its way. Beyond this, the caller decides whether to try another replica. It can do so until it
has read the first byte of an answer's body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.engine.light_json import parse_answer
from coordinator.engine.sockets import tls_context
from gateway.deadlines import Deadlines
from gateway.upstream.answer import Answer
from gateway.upstream.connection import Buffer
from gateway.upstream.errors import UpstreamError
from gateway.upstream.origin import Origin, Tls

Headers = Mapping[str, str]
MAX_CONTROL_BYTES = 2 * 2**20
"""Of an answer to a control request. Reading that much takes less than 50 ms, whatever its content."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CONTROL_HEADERS = {"accept": "*/*"}


class ControlAnswer(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes


class Upstream:
    """Pooled connections to all replicas. Create it inside a running loop, and `close` it at the end."""

    def __init__(self, idle_s: float, api_key: str | None, tls: Tls = tls_context) -> None:
        """A replica may be silent in the middle of an answer for `idle_s`. `tls` gives the context of each new
        connection to a replica with https://. By default, that trusts what the system does, and shows no
        certificate."""
        self._tls = tls
        self._key_line = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._origins: dict[str, Origin] = {}
        self._control_origins: dict[str, Origin] = {}
        """The gateway's own requests have their own connections: a client's request never gets one that a check
        left."""
        self._kept: frozenset[str] | None = None
        """The replicas whose connections are kept for the next request; None means all."""
        self.idle_s = idle_s
        self._deadlines = Deadlines()

    async def send(
        self,
        method: str,
        url: str,
        target: str,
        headers: Headers,
        body: Sequence[Buffer] = (),
        has_effects: bool = False,
    ) -> Answer:
        """Send a client's request to the replica at `url`, and wait for its answer's head. `target` (path and query)
        and the pieces of the body are sent unchanged. If the request `has_effects`, it gets a new connection, because
        it must not be sent twice. Raises UpstreamError."""
        origin = self._origins.get(url) or self._new_origin(url)
        return await self._send(origin, method, target, headers, body, self._key_line, has_effects)

    async def _send(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Headers,
        body: Sequence[Buffer],
        key_line: str,
        on_new_connection: bool = False,
    ) -> Answer:
        lines = [f"{method} {origin.path_prefix}{target} HTTP/1.1\r\nhost: {origin.host_header}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        lines.append(key_line)
        body_bytes = sum(map(len, body))
        if body_bytes or method in _WITH_BODY:
            lines.append(f"content-length: {body_bytes}\r\n")
        lines.append("\r\n")
        head = "".join(lines).encode("latin-1")
        while True:
            connection = await (origin.replace_idle() if on_new_connection else origin.acquire())
            answer = connection.send(head, body, method == "HEAD", self._deadlines, self.idle_s)
            try:
                await answer.head()
                return answer
            except BaseException as error:
                answer.close()
                if not isinstance(error, UpstreamError) or error.reason != "stale":
                    raise
                on_new_connection = True

    def _new_origin(self, url: str) -> Origin:
        origin = Origin(url, self._tls)
        if self._kept is None or url in self._kept:
            self._origins[url] = origin
        else:  # the request was placed just before the replica went
            origin.retire()
        return origin

    def keep_only(self, urls: Iterable[str]) -> None:
        """From now on, keep connections to these replicas only. Running requests to others finish."""
        self._kept = frozenset(urls)
        for origins in (self._origins, self._control_origins):
            for url in origins.keys() - self._kept:
                origins.pop(url).retire()

    async def get(self, url: str, path: str, timeout_s: float, with_key: bool = True) -> ControlAnswer:
        """GET a path of the replica at `url` for control, within `timeout_s`. Raises UpstreamError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(url, path, with_key)
        except TimeoutError:
            raise UpstreamError("timeout", f"{url}{path} did not answer within {timeout_s:g} s") from None

    async def _get(self, url: str, path: str, with_key: bool) -> ControlAnswer:
        origin = self._control_origins.get(url)
        if origin is None:
            origin = self._control_origins[url] = Origin(url, self._tls)
        answer = await self._send(origin, "GET", path, _CONTROL_HEADERS, (), self._key_line if with_key else "")
        try:
            if not await answer.gathered(MAX_CONTROL_BYTES, lambda _size_bytes: True):
                raise UpstreamError("protocol", f"GET {url}{path} answered more than {MAX_CONTROL_BYTES} bytes")
            return ControlAnswer(answer.status, answer.take())
        finally:
            answer.close()

    async def get_json(self, url: str, path: str, timeout_s: float) -> Any:
        """GET a JSON document. Raises UpstreamError for anything but a 200 with JSON."""
        answer = await self.get(url, path, timeout_s)
        try:
            return parse_answer(f"GET {url}{path}", answer.status, answer.body)
        except ValueError as error:
            raise UpstreamError("protocol", str(error)) from error

    async def close(self) -> None:
        for origin in (*self._origins.values(), *self._control_origins.values()):
            origin.close()
