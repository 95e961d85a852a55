"""Answers only who calls a gateway by a name of its own (the header Host).

A web page can have the name of its own host point at a gateway's address (DNS rebinding). Then a browser lets the page
talk to the gateway as if it were its own server, and nothing but this name tells. It matters where no API key is asked
for. Nobody can give a public name to `localhost`, to an address, or to names that only private networks have.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache

from gateway.errors import ApiError
from gateway.http.exchange import Exchange

ANY = "*"
_PRIVATE = (".localhost", ".local", ".internal", ".svc", ".test", ".home.arpa")
"""RFC 6761, 6762 and 8375, ICANN's .internal, and the names of services in Kubernetes."""


class Hosts:
    """The names by which clients may call."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: besides those that every gateway has; `*` for any."""
        self._names = frozenset(name.lower() for name in names)
        self._is_ours = lru_cache(maxsize=256)(self._judge)

    def refuses(self, exchange: Exchange) -> bool:
        """Whether a request calls another host; then it is answered. One without a Host is no browser's."""
        host = exchange.headers.get("host")
        if not host or self._is_ours(host):
            return False
        message = (
            f"host: {host[:100]!r} is not a name of this gateway. Without API keys it answers to localhost, addresses "
            "and private names; add others to security.hosts."
        )
        error = ApiError(403, "host_not_allowed", message, "host")
        exchange.whole(error.status, [(b"content-type", b"application/json")], error.body())
        return True

    def _judge(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        name = name.removesuffix(".")
        if ANY in self._names or name in self._names or "." not in name or name.endswith(_PRIVATE):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
