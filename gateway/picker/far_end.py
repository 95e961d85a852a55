"""The far end of a call: the replica behind Envoy."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from gateway.deadlines import Deadlines
from gateway.picker.call import CURRENT
from gateway.replicas.served import endpoint_in
from gateway.request.reader import not_in_subset
from gateway.upstream import Answer, Upstream, UpstreamError
from gateway.upstream.client import Headers
from gateway.upstream.connection import Buffer
from gateway.upstream.origin import path_prefix

_KEPT_S = 5.0


class FarEnd:
    """Sends requests as `Upstream` does. Envoy takes the first attempt of a call. It cannot take a second one, so the
    picker sends that itself."""

    def __init__(self, direct: Upstream, endpoints: Endpoints, api_key: str | None) -> None:
        self._direct, self._endpoints = direct, endpoints
        self._key = {"authorization": f"Bearer {api_key}"} if api_key else {}
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
        """See Upstream.send. Raises a 503 for a replica that the proxy does not allow."""
        call = CURRENT.get()
        if call is not None and call.head.subset is not None and endpoint_in(url) not in call.head.subset:
            raise not_in_subset()  # of an object that only its replica has
        if call is None or call.is_sent:
            return await self._direct.send(method, url, target, headers, body, has_effects)
        endpoint = ",".join([await self._endpoints.of(each) for each in (url, *call.others)])
        told = {**headers, **self._key}
        return await call.send(
            endpoint, path_prefix(urlsplit(url)) + target, told, body, self._deadlines, self._direct.idle_s
        )


class Endpoints:
    """The addresses of replicas. Those of names are remembered for _KEPT_S, as looking them up takes a thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    async def of(self, url: str) -> str:
        """The `ip:port` of a replica's URL. Envoy takes no names. Raises UpstreamError."""
        known, until_s = self._known.get(url, ("", 0.0))
        if time.monotonic() < until_s:
            return known
        endpoint = endpoint_in(url)
        host, _, port = endpoint.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            found = await _looked_up(host, int(port))
            endpoint = f"[{found}]:{port}" if ":" in found else f"{found}:{port}"
            self._known[url] = endpoint, time.monotonic() + _KEPT_S
        return endpoint


async def _looked_up(host: str, port: int) -> str:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UpstreamError("refused", f"{host} has no address ({error})") from error
    return str(found[0][4][0])
