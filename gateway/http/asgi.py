"""Lets an ASGI application answer an exchange: for all routes that need not be fast."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from gateway.http.exchange import ClientGone, Exchange


async def run_asgi(app: ASGIApp, exchange: Exchange, added_headers: list[tuple[bytes, bytes]]) -> None:
    """Let `app` answer, and add `added_headers` to its answer."""
    pieces: list[bytes] = []
    start: dict[str, Any] = {}

    async def receive() -> Message:
        try:
            piece = await exchange.receive()
        except ClientGone:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": bytes(piece), "more_body": bool(piece)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
            exchange.whole(start["status"], [*headers, *added_headers], b"".join(pieces))

    exchange.stops_when_gone = True
    try:
        await app(_scope(exchange), receive, send)
    except asyncio.CancelledError:
        if not exchange.is_gone:
            raise


def _scope(exchange: Exchange) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": exchange.http_version,
        "method": exchange.method,
        "scheme": "http",
        "path": exchange.path,
        "raw_path": exchange.path.encode(),
        "query_string": exchange.query,
        "root_path": "",
        "headers": exchange.raw_headers,
        "client": (exchange.peer, 0) if exchange.peer else None,
        "server": None,
    }
