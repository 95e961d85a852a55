"""Sends a prompt from the console's page as a request of the admin whose session it is."""

from __future__ import annotations

from starlette.requests import cookie_parser

from gateway.console.sessions import COOKIE, Sessions
from gateway.http.exchange import Exchange
from gateway.relay.proxy import Proxy
from gateway.request.keyring import Caller

ASK_PATH, _API_PATH = "/console/chat", "/v1/chat/completions"


class Asking:
    """Answers what the page sends to ASK_PATH: a chat request, as the API takes it."""

    def __init__(self, sessions: Sessions, proxy: Proxy) -> None:
        self._sessions, self._proxy = sessions, proxy

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        exchange.path = _API_PATH
        await self._proxy(exchange, self._identify)

    async def _identify(self, exchange: Exchange) -> Caller:
        """Whose session it is. Raises ApiError if there is none, or if no page of it sends the request."""
        cookie = cookie_parser(exchange.headers.get("cookie", "")).get(COOKIE, "")
        return await self._sessions.acting(cookie, exchange.headers.get("x-kvgate-csrf", ""))
