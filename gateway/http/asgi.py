"""Lets an ASGI application answer an exchange: for all routes that need not be fast."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from gateway.http.exchange import ClientGone, Exchange


async def run_asgi(app: ASGIApp, exchange: Exchange, added_headers: list[tuple[bytes, bytes]]) -> None:
    """Let `app` answer, and add `added_headers` to its answer."""
    start: dict[str, Any] = {}
    has_all = False

    async def receive() -> Message:
        nonlocal has_all
        if has_all:  # it waits for the end of the connection, which cancels this task
            await asyncio.get_running_loop().create_future()
        try:
            piece = await exchange.receive()
        except ClientGone:
            return {"type": "http.disconnect"}
        has_all = not piece
        return {"type": "http.request", "body": bytes(piece), "more_body": bool(piece)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        body, has_more = message.get("body", b""), message.get("more_body", False)
        if not exchange.has_started:
            headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
            headers += added_headers
            if not has_more:
                exchange.whole(start["status"], headers, body)
                return
            exchange.start(start["status"], headers)
        if not has_more:
            exchange.end(body)
        elif body and not exchange.write(body):
            await exchange.drained()

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
        "scheme": exchange.scheme,
        "path": exchange.path,
        "raw_path": exchange.path.encode(),
        "query_string": exchange.query,
        "root_path": "",
        "headers": exchange.raw_headers,
        "client": (exchange.peer, 0) if exchange.peer else None,
        "server": None,
    }
