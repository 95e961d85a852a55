"""Lets web pages of other origins call the gateway from a browser (CORS: https://fetch.spec.whatwg.org/#http-cors-protocol).

A browser asks first, without credentials (a preflight), so it is answered before anybody's key is checked. Answers to
pages of allowed origins say so. There are no cookies in the API, so none are allowed. The console is for its own page
only, and metrics are for nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.http.exchange import Exchange

ANY = "*"
_NOT_FOR_PAGES = ("/console", "/metrics")
_METHODS = b"GET, POST, PUT, PATCH, DELETE"
_GOOD_FOR_S = b"600"
"""How long a browser remembers the answer to a preflight."""


class Cors:
    """Answers preflights, and marks what pages of the allowed origins may read."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins` have the form in which browsers send them, like https://app.example.com; or `*` for any."""
        self._origins = frozenset(origins)

    def answers(self, exchange: Exchange) -> bool:
        """Answer a preflight, and return True. Otherwise give the exchange the headers that its answer needs."""
        if not self._origins or exchange.path.startswith(_NOT_FOR_PAGES):
            return False
        origin = exchange.headers.get("origin", "")
        is_allowed = origin != "" and (origin in self._origins or ANY in self._origins)
        allowed = ANY if ANY in self._origins else origin
        headers = [(b"vary", b"origin")]
        if is_allowed:
            headers.append((b"access-control-allow-origin", allowed.encode("latin-1")))
        if not (exchange.method == "OPTIONS" and "access-control-request-method" in exchange.headers):
            if is_allowed:
                headers.append((b"access-control-expose-headers", b"*"))
            exchange.added_headers = headers
            return False
        if is_allowed:
            asked = exchange.headers.get("access-control-request-headers", "")
            headers += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", asked.encode("latin-1")),
                (b"access-control-max-age", _GOOD_FOR_S),
            ]
        exchange.whole(204, headers, b"")
        return True
