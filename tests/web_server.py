"""A test's own server, over real HTTP."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(application: web.Application, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves inside the context, by default on a free port, and yields the URL. On exit it cuts off open streams."""
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
