"""The gRPC server of a picker: ext_proc, and the health service."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from gateway.picker.messages import ProcessingRequest, ProcessingResponse
from gateway.settings.picker_settings import PickerSettings
from gateway.tls import BadCertificate, Certificate

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH_NAMES: Final = ("", "liveness", "readiness", SERVICE)
_LOOK_S: Final = 0.25
_MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Envoy's messages have at most what its buffers hold."""
_VALID: Final = dt.timedelta(days=3650)


class Service:
    """Listens for calls between `start` and `stop`. `answer` answers one call."""

    def __init__(self, settings: PickerSettings, answer: Callable[[Any], Awaitable[None]]) -> None:
        self._settings, self._answer = settings, answer
        self._health = HealthServicer()
        self._server: Any = None

    async def start(self) -> None:
        """Raises OSError if the port is taken, BadCertificate."""
        host = self._settings.host
        address = f"{f'[{host}]' if ':' in host else host}:{self._settings.port}"
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.http2.max_ping_strikes", 0),  # a proxy may look whether the connection lives as often as it likes
        ]
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        shown = credentials(self._settings)
        try:
            if shown is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, shown)
        except RuntimeError as error:
            raise OSError(f"picker.port {self._settings.port}: it cannot be bound") from error
        await self.tell_health(is_ready=False)
        await self._server.start()

    async def _process(self, _requests: Any, context: Any) -> None:
        await self._answer(context)

    async def tell_health(self, *, is_ready: bool) -> None:
        """The health service says this from now on."""
        serving = health_pb2.HealthCheckResponse.SERVING
        ready = serving if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in _HEALTH_NAMES:
            await self._health.set(name, serving if name == "liveness" else ready)

    async def follow(self, is_ready: Callable[[], bool]) -> None:
        """A background task: the health service says what `is_ready` says."""
        told: bool | None = None
        while True:
            if (now := is_ready()) != told:
                told = now
                await self.tell_health(is_ready=now)
            await asyncio.sleep(_LOOK_S)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and end those that run after `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)


def credentials(settings: PickerSettings) -> Any:
    """The server's certificate; None without TLS. The extension's gateways do not check it, so that one made at the
    start is enough. Raises BadCertificate."""
    if settings.tls == "off":
        return None
    if settings.tls == "self-signed":
        return grpc.ssl_server_credentials([_self_signed()])
    tls = settings.tls
    Certificate("picker.tls", tls, lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # gRPC does not say what is wrong
    pair = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    if tls.client_ca is None:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], _authority(tls.client_ca), require_client_auth=True)


def _authority(file: str) -> bytes:
    try:
        ssl.create_default_context(cafile=file)
        return Path(file).read_bytes()
    except OSError as error:
        raise BadCertificate(f"picker.tls.client_ca: {file} has no certificate in PEM ({error.strerror})") from None


def _self_signed() -> tuple[bytes, bytes]:
    """A key and its certificate, in PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvgate picker")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)
