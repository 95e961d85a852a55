"""The process: sockets, uvicorn, signals.

SIGTERM or SIGINT: stop accepting, finish what is being answered for at most `timeouts.grace_s`, deregister, exit 0.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn

from gateway.app import App
from gateway.http.protocol import HttpProtocol
from gateway.logs import configure
from gateway.settings.gateway_settings import GatewaySettings

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn's server; while it drains, /ready says so."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own: that raises the signal again after a clean stop, and the exit code would say killed."""
        if self._app.gateway is not None:
            self._app.gateway.status.is_draining = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def listen(host: str, port: int, shared: bool) -> socket.socket:
    """A listening socket; `shared` ones may be several on one port (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        raise OSError(error.errno, f"port {port}: {error.strerror}") from None
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def _protocols(app: App, write_s: float) -> Callable[..., HttpProtocol]:
    """As uvicorn makes them, one for each connection."""
    return lambda config, server_state, app_state, _loop: HttpProtocol(app.answer, server_state, write_s)


def serve(settings: GatewaySettings) -> None:
    """Run one gateway until it is told to stop. Raises OSError when a port is taken."""
    configure(settings.log, gateway=settings.id)
    sockets = [listen(settings.host, settings.port, shared=False)]
    if settings.shared_port is not None:
        sockets.append(listen(settings.host, settings.shared_port, shared=True))
    app = App(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast("type[asyncio.Protocol]", _protocols(app, settings.timeouts.write_s)),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=cast("int", settings.timeouts.grace_s),  # which uvicorn takes whole or not
        backlog=_BACKLOG,
    )
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_Server(config, app).serve(sockets))
