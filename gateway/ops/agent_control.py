"""The agent's control port. `GET /drain` drains the replica, and is answered when its last request is over.

It is for a preStop hook of the engine beside the agent. A hook that needs no program in the engine's image can only
send a GET. It must send the header `x-kvgate-drain`, which a web page cannot make a browser send here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from coordinator.agent.agent import Agent
from coordinator.errors import StoreError

HEADER = "x-kvgate-drain"
_CLOSE_S = 1.0


@asynccontextmanager
async def control_port(agent: Agent, port: int) -> AsyncIterator[None]:
    """Listens on `port` of all addresses inside the context; not at all if it is 0. Raises OSError if it is taken."""
    if not port:
        yield
        return

    async def drain(request: web.Request) -> web.Response:
        if HEADER not in request.headers:
            return web.Response(status=400, text=f"to drain the replica, send the header {HEADER}: 1\n")
        try:
            await agent.drain()
        except StoreError as error:
            return web.Response(status=503, text=f"cannot drain: {error}\n")
        return web.Response(text="drained\n")

    app = web.Application()
    app.router.add_get("/drain", drain)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
