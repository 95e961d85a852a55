"""rediss:// and a password, against a Redis that accepts no other connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.errors import StoreError
from coordinator.redis.wire import Wire
from coordinator.store import Store, StoreOptions
from gateway.ops.local.embedded_redis import system_redis
from gateway.ops.local.ports import free_ports
from tests.certificates import self_signed
from tests.polling import eventually
from tests.programs import needs
from tests.redis_server import running_redis

pytestmark = needs("redis-server", "openssl")  # the wheel's Redis is built without TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key in the same folder."""
    folder = tmp_path_factory.mktemp("tls")
    return self_signed(folder, "redis", "127.0.0.1")[0]


@pytest.fixture(scope="module")
def tls_port(certificate: Path) -> Iterator[int]:
    port = free_ports(1)[0]
    options = (
        *("--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "open sesame"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(certificate.with_suffix(".key"))),
        *("--tls-ca-cert-file", str(certificate)),
    )
    with running_redis(str(system_redis()), options):
        yield port


async def test_a_store_connects_over_tls_with_a_password(certificate: Path, tls_port: int) -> None:
    url = f"rediss://:open%20sesame@127.0.0.1:{tls_port}/0?ssl_ca_certs={certificate}"
    store = Store(StoreOptions(url, budget_s=0.5), "gw.1")
    running = asyncio.get_running_loop().create_task(store.run())
    await eventually(store.is_up)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("credentials", "trust"),
    [(":wrong@", True), ("", True), (":open%20sesame@", False)],
    ids=["wrong", "none", "untrusted"],
)
async def test_a_wrong_password_or_an_unknown_certificate_is_refused(
    certificate: Path, tls_port: int, credentials: str, trust: bool
) -> None:
    url = f"rediss://{credentials}127.0.0.1:{tls_port}/0" + (f"?ssl_ca_certs={certificate}" if trust else "")
    with pytest.raises(StoreError):
        await greet(url)


async def greet(url: str) -> None:
    wire = await Wire.open(url, 2.0, lambda _error: None)
    try:
        await wire.send("PING")
    finally:
        await wire.close()
