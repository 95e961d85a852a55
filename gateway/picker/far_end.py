"""The far end of a call: the replica behind Envoy."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from gateway.deadlines import Deadlines
from gateway.picker.call import CURRENT
from gateway.replicas.served import endpoint_in
from gateway.request.reader import not_in_subset
from gateway.upstream import Answer, Upstream, UpstreamError
from gateway.upstream.client import Headers
from gateway.upstream.connection import Buffer

_SAFE_IN_PATH = "/%:@!$&'()*+,;="


class FarEnd:
    """Sends requests as `Upstream` does. Envoy takes the first attempt of a call. It cannot take a second one, so the
    picker sends that itself."""

    def __init__(self, direct: Upstream, api_key: str | None) -> None:
        self._direct = direct
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
        endpoint = ",".join([await endpoint_of(each) for each in (url, *call.others)])
        prefix = quote(urlsplit(url).path.rstrip("/"), safe=_SAFE_IN_PATH)
        told = {**headers, **self._key}
        return await call.send(endpoint, prefix + target, told, body, self._deadlines, self._direct.idle_s)


async def endpoint_of(url: str) -> str:
    """The `ip:port` of a replica's URL. Envoy takes no names. Raises UpstreamError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UpstreamError("refused", f"{host} has no address ({error})") from error
        address = ipaddress.ip_address(found[0][4][0])
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
