"""The gateway process: its sockets, uvicorn, signals.

On SIGTERM or SIGINT it stops listening, answers who has connected already, finishes running requests for at most
`timeouts.grace_s`, deregisters, and exits with 0. On SIGHUP it reads its configuration again.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, cast

import structlog
import uvicorn
from uvicorn.server import ServerState

from gateway.access_log import check_target
from gateway.app import App, Gateway
from gateway.http.protocol import Handler, HttpProtocol
from gateway.logs import configure
from gateway.reload import ConfigFiles, tell_doubts
from gateway.request.memory import Storms, give_memory_back
from gateway.settings.gateway_settings import GatewaySettings
from gateway.tls import Certificates, of_listener, towards_replicas
from gateway.tracing.otel_variables import OtelVariables

_log = structlog.get_logger("kvgate.server")
_BACKLOG = 2048
_HANDSHAKES_S = 1.0
_TELLS_S = 0.1


class Server(uvicorn.Server):
    """uvicorn's server. While it drains, /ready says so."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app
        self._storms = Storms()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second, and stops if it is true."""
        if self._storms.is_over(len(self.server_state.connections)):
            asyncio.get_running_loop().run_in_executor(None, give_memory_back)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's own, which raises the signal again after a clean stop: the exit code would say killed."""
        if self._app.gateway is not None:
            self._app.gateway.status.is_draining = True
            self.config.timeout_graceful_shutdown = _grace_s(self._app.settings)
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer also who has connected and was not accepted yet: closing a listening socket resets these."""
        loop = asyncio.get_running_loop()

        def make() -> asyncio.Protocol:
            told = {"server_state": self.server_state, "app_state": self.lifespan.state, "_loop": loop}
            return cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)(config=self.config, **told)

        waiting = [each for sock in sockets or () for each in _accepted(sock)]
        for server in self.servers:
            server.close()
        made = [loop.connect_accepted_socket(make, each, ssl=self.config.ssl) for each in waiting]
        telling = loop.create_task(self._tell_all())
        with suppress(TimeoutError):
            async with asyncio.timeout(_HANDSHAKES_S):
                await asyncio.gather(*made, return_exceptions=True)
        try:
            await super().shutdown(sockets)
        finally:
            telling.cancel()

    async def _tell_all(self) -> None:
        """Tell connections that the server stops, also those whose TLS begins only now."""
        while True:
            for connection in list(self.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(_TELLS_S)


def _accepted(sock: socket.socket) -> list[socket.socket]:
    """The connections that wait to be accepted."""
    found: list[socket.socket] = []
    with suppress(OSError):  # most often because there are no more
        while len(found) < _BACKLOG:
            connection, _ = sock.accept()
            connection.setblocking(False)
            found.append(connection)
    return found


def listen(host: str, port: int, shared: bool) -> socket.socket:
    """A listening socket. Several `shared` ones may listen on one port (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"port {port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def _grace_s(settings: GatewaySettings) -> int:
    """For uvicorn, which takes a fraction, too."""
    return cast("int", settings.timeouts.grace_s)


def protocols(handle: Handler, write_s: Callable[[], float]) -> type[asyncio.Protocol]:
    """Makes the protocol of each connection, when uvicorn asks for it. (It would take a class, too.)"""

    def make(
        config: uvicorn.Config, server_state: ServerState, app_state: Any, _loop: asyncio.AbstractEventLoop | None
    ) -> HttpProtocol:
        return HttpProtocol(handle, server_state, write_s())

    return cast("type[asyncio.Protocol]", make)


def serve(settings: GatewaySettings, otel: OtelVariables, files: ConfigFiles, make: type[Gateway] = Gateway) -> None:
    """Run one gateway until a signal stops it. `settings` are those in `files`. Raises OSError if a port is taken,
    CannotWrite for an access log, BadCertificate."""
    configure(settings.log, gateway=settings.id)
    tell_doubts(files.doubts(settings))
    check_target(settings.log.access_log)
    certificate = of_listener(settings.tls)
    app = App(settings, Certificates(certificate, towards_replicas(settings.replica_tls)), otel, files, make)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=protocols(app.answer, lambda: app.settings.timeouts.write_s),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_grace_s(settings),
        backlog=_BACKLOG,
    )
    if certificate is not None:
        config.load()
        config.ssl = certificate.first  # uvicorn would make one that cannot change
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda _sig, _frame: app.reload())
    with ExitStack() as listening, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        sockets = [listening.enter_context(listen(settings.host, settings.port, shared=False))]
        if settings.shared_port is not None:
            sockets.append(listening.enter_context(listen(settings.host, settings.shared_port, shared=True)))
        runner.run(Server(config, app).serve(sockets))
