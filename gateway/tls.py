"""Certificates of this gateway: the one that clients see, and the one that replicas see. Each is loaded again when its
files change, so whoever renews it need not restart a gateway. Connections that are open keep the one that they began
with.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog

from coordinator.engine.sockets import tls_context
from gateway.settings.certificate_settings import CertificateSettings

_log = structlog.get_logger("kvgate.tls")

LOOK_S = 5.0


class BadCertificate(Exception):
    """The files have no certificate and key that fit."""


class Certificate:
    """A certificate and its key in a TLS context. `run()` is a background task."""

    def __init__(self, name: str, settings: CertificateSettings, make_context: Callable[[], ssl.SSLContext]) -> None:
        """`name` is that of the setting. Raises BadCertificate."""
        self.name, self._make_context = name, make_context
        self._certificate, self._key = Path(settings.certificate), Path(settings.key)
        self._seen = self._files()
        self._reason = ""
        """Why it was not loaded again when that was tried last."""
        self.first = self.context = self._loaded()
        """The context of the start, for those who keep one; and the one for the next connection."""

    def __repr__(self) -> str:
        return f"<Certificate {self._certificate}>"

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = await asyncio.to_thread(self._files)
                if found == self._seen:
                    continue
                self._seen = found
                self.context = self._loaded()
                # A key of another kind stays beside the one before: whoever keeps this context shows either.
                self.first.load_cert_chain(self._certificate, self._key, password=no_password)
            except (BadCertificate, ssl.SSLError, OSError) as error:  # it is written just now, or wrongly
                if self._reason != str(error):
                    self._reason = str(error)
                    _log.warning("certificate not loaded", setting=self.name, reason=self._reason)
            else:
                self._reason = ""
                _log.info("certificate loaded", setting=self.name, file=str(self._certificate))

    def _files(self) -> tuple[bytes, bytes]:
        return _read(self.name, "certificate", self._certificate), _read(self.name, "key", self._key)

    def _loaded(self) -> ssl.SSLContext:
        context = self._make_context()
        try:
            context.load_cert_chain(self._certificate, self._key, password=no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            why = f"{self.name}: {self._certificate} and {self._key} are not a certificate and its key, in PEM"
            raise BadCertificate(f"{why} ({error})") from None
        return context


class Certificates(NamedTuple):
    """Those of a gateway, as far as there are any."""

    own: Certificate | None = None
    """What clients see."""
    shown: Certificate | None = None
    """What replicas see."""


def of_listener(settings: CertificateSettings | None) -> Certificate | None:
    """What clients see, with TLS 1.2 or newer. A server has one context: `first`. With each connection, that one hands
    over to the context of now. Raises BadCertificate."""
    if settings is None:
        return None

    def make_context() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        return context

    certificate = Certificate("tls", settings, make_context)

    def hand_over(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = certificate.context

    certificate.first.sni_callback = hand_over
    return certificate


def towards_replicas(settings: CertificateSettings | None) -> Certificate | None:
    """What replicas see. It trusts what the system does, and what SSL_CERT_FILE says. Raises BadCertificate."""
    return None if settings is None else Certificate("replica_tls", settings, ssl.create_default_context)


def contexts_of(certificate: Certificate | None) -> Callable[[], ssl.SSLContext]:
    """What gives the context of each new connection to a replica. Without a certificate, none is shown."""
    return tls_context if certificate is None else lambda: certificate.context


def no_password() -> str:
    """Called for a key with a password. Without it, OpenSSL would ask the terminal. Raises ValueError."""
    raise ValueError("the key has a password; write it without one")


def _read(name: str, field: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadCertificate(f"{name}.{field}: cannot read {file} ({error.strerror})") from None
