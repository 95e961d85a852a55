"""A server of a test's own, over real HTTP."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(application: web.Application, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves until the end, on a free port if none is named; gives its URL. Streams that go on then are cut off."""
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
