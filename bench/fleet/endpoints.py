"""The part of a Kubernetes API server that tells gateways which replicas there are: EndpointSlices, listed and watched.

A watch sends nothing, and ends when something changes. A gateway then lists again, as it does after each watch that a
real API server ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import httptools
import orjson

SERVICE, NAMESPACE, TOKEN = "vllm", "models", "a token of the bench"
_PER_SLICE = 100
"""As in Kubernetes, by default."""
_WATCH_S = 30.0
_WATCH_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
_WATCH_END = b"0\r\n\r\n"


class EndpointsApi:
    """Serves the published replicas. `publish` changes them."""

    def __init__(self, port: int) -> None:
        self._port = port
        """The port of all replicas."""
        self._version = 1
        self._addresses: dict[str, str] = {}
        self.watches: set[_Connection] = set()

    async def start(self, port: int) -> None:
        await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", port)

    def publish(self, addresses: Mapping[str, str]) -> None:
        """From now on, these are the replicas: their addresses by id."""
        self._addresses, self._version = dict(addresses), self._version + 1
        for watch in tuple(self.watches):
            watch.end()

    def listed(self) -> bytes:
        found = list(self._addresses.items())
        slices = [self._slice(at, found[at : at + _PER_SLICE]) for at in range(0, len(found), _PER_SLICE)]
        return orjson.dumps({"metadata": {"resourceVersion": str(self._version)}, "items": slices})

    def _slice(self, at: int, part: list[tuple[str, str]]) -> dict[str, Any]:
        return {
            "metadata": {"name": f"{SERVICE}-{at}", "namespace": NAMESPACE},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": self._port}],
            "endpoints": [
                {"addresses": [address], "conditions": {"ready": True}, "targetRef": {"kind": "Pod", "name": name}}
                for name, address in part
            ],
        }


class _Connection(asyncio.Protocol):
    def __init__(self, api: EndpointsApi) -> None:
        self._api = api
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_message_complete(self) -> None:
        if b"watch=1" in self._url:
            self._api.watches.add(self)
            self._timer = asyncio.get_running_loop().call_later(_WATCH_S, self.end)
            self._transport.write(_WATCH_HEAD)
            return
        body = self._api.listed()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def end(self) -> None:
        """End the watch."""
        self._forget()
        self._transport.write(_WATCH_END)

    def _forget(self) -> None:
        self._api.watches.discard(self)
        if self._timer is not None:
            self._timer.cancel()
