"""TLS towards replicas: gateways and agents trust the same certificates."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from coordinator.agent.control_client import ControlClient, ControlError
from coordinator.engine.sockets import tls_context
from gateway.upstream import Upstream, UpstreamError
from tests.certificates import self_signed
from tests.programs import needs
from tests.web_server import serving

pytestmark = needs("openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"), "replica", "127.0.0.1")


@pytest.fixture
async def url(certificate: tuple[Path, Path]) -> AsyncIterator[str]:
    """A replica with a self-signed certificate."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    app = web.Application()
    app.router.add_get("/health", _answer)
    async with serving(app, tls=tls) as url:
        yield url


async def _answer(_: web.Request) -> web.Response:
    return web.Response(text="hi")


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    tls_context.cache_clear()
    yield
    tls_context.cache_clear()


async def agents_answer(url: str) -> tuple[int, bytes]:
    client = ControlClient()
    try:
        return await client.get(f"{url}/health", 30)
    finally:
        await client.close()


async def gateways_answer(url: str) -> tuple[int, bytes]:
    upstream = Upstream(300, None)
    try:
        answer = await upstream.get(url, "/health", 30)
        return answer.status, answer.body
    finally:
        await upstream.close()


async def test_an_authority_in_ssl_cert_file_is_trusted(
    url: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert await agents_answer(url) == (200, b"hi")
    assert await gateways_answer(url) == (200, b"hi")


async def test_another_certificate_is_refused_and_the_error_says_so(url: str) -> None:
    with pytest.raises(ControlError, match="certificate verify failed"):
        await agents_answer(url)
    with pytest.raises(UpstreamError, match="certificate verify failed"):
        await gateways_answer(url)
