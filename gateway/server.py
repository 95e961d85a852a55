"""The gateway process: its sockets, uvicorn, signals.

On SIGTERM or SIGINT it stops accepting, finishes running requests for at most `timeouts.grace_s`, deregisters, and
exits with 0.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn

from gateway.access_log import check_target
from gateway.app import App
from gateway.http.protocol import HttpProtocol
from gateway.logs import configure
from gateway.settings.gateway_settings import GatewaySettings
from gateway.tls import Certificates, of_listener, towards_replicas
from gateway.tracing.tracing import check_extra

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn's server. While it drains, /ready says so."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's own, which raises the signal again after a clean stop: the exit code would say killed."""
        if self._app.gateway is not None:
            self._app.gateway.status.is_draining = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def listen(host: str, port: int, shared: bool) -> socket.socket:
    """A listening socket. Several `shared` ones may listen on one port (SO_REUSEPORT)."""
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
    """Makes the protocol of each connection, when uvicorn asks for it."""
    return lambda config, server_state, app_state, _loop: HttpProtocol(app.answer, server_state, write_s)


def serve(settings: GatewaySettings) -> None:
    """Run one gateway until a signal stops it. Raises OSError if a port is taken, CannotWrite for an access log,
    BadCertificate, MissingExtra."""
    configure(settings.log, gateway=settings.id)
    check_target(settings.log.access_log)
    check_extra(settings.tracing)
    sockets = [listen(settings.host, settings.port, shared=False)]
    if settings.shared_port is not None:
        sockets.append(listen(settings.host, settings.shared_port, shared=True))
    certificate = of_listener(settings.tls)
    app = App(settings, Certificates(certificate, towards_replicas(settings.replica_tls)))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast("type[asyncio.Protocol]", _protocols(app, settings.timeouts.write_s)),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=cast("int", settings.timeouts.grace_s),  # a fraction works, too
        backlog=_BACKLOG,
    )
    if certificate is not None:
        config.load()
        config.ssl = certificate.first  # uvicorn would make one that cannot change
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_Server(config, app).serve(sockets))
