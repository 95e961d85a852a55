"""TLS that a gateway ends itself, and certificates that it shows to replicas."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from bench.cluster import Cluster, SimReplica
from gateway.ops.local.ports import free_ports
from tests.api.conftest import GUARDED
from tests.api.stage import Stage, chat_body, fresh, running_agent, running_gateway, running_sims
from tests.certificates import self_signed
from tests.polling import wait_until
from tests.programs import needs

pytestmark = needs("openssl")

KEPT = httpx.Limits(keepalive_expiry=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def files(folder: Path) -> tuple[Path, Path]:
    return self_signed(folder, "gateway", "127.0.0.1")


@pytest.fixture(scope="module")
def url(folder: Path, files: tuple[Path, Path], open_cluster: Cluster) -> Iterator[str]:
    """Another gateway of the open cluster, with TLS."""
    config = {"tls": named(files)}
    with running_gateway(folder, open_cluster.redis_url, open_cluster.replicas, config) as url:
        yield url


@pytest.fixture
def client(files: tuple[Path, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(verify=ssl.create_default_context(cafile=str(files[0])), timeout=20, limits=KEPT) as client:
        yield client


def named(files: tuple[Path, Path]) -> dict[str, str]:
    """A certificate and its key, as settings name them."""
    return {"certificate": str(files[0]), "key": str(files[1])}


def shown(url: str) -> bytes:
    """The certificate that a new connection sees."""
    address = urlsplit(url)
    return ssl.get_server_certificate((str(address.hostname), int(address.port or 0))).encode()


def test_requests_streams_and_large_bodies_go_over_tls(client: httpx.Client, url: str) -> None:
    body = chat_body(fresh("large ") * 20_000)
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    with client.stream(
        "POST", f"{url}/v1/chat/completions", json=chat_body(fresh(), stream=True, max_tokens=50)
    ) as read:
        assert read.status_code == 200
        assert list(read.iter_lines())[-2] == "data: [DONE]"
    refused = client.post(f"{url}/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert refused.status_code == 400


def test_a_client_without_tls_gets_nothing(url: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url.replace("https", "http") + "/health")
    assert "does it want https?" in kvgate("queue", "--gateway", url.replace("https", "http")).stderr


def test_a_client_that_cannot_be_read_gets_its_answer_before_the_end(url: str, files: tuple[Path, Path]) -> None:
    address = urlsplit(url)
    context = ssl.create_default_context(cafile=str(files[0]))
    with (
        socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        sock.sendall(b"GET / HTTP/1.1\r\nno header\r\n\r\n" + b"x" * 1000)
        assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_hangs_up_over_tls_is_noticed(client: httpx.Client, url: str, stage: Stage) -> None:
    def gone() -> float:
        lines = client.get(f"{url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("kvgate_client_disconnects_total ")).split()[1])

    for sim in stage.sims:
        sim.fail("hang", after_tokens=1)
    with client.stream("POST", f"{url}/v1/chat/completions", json=chat_body(fresh(), stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        before = gone()
    wait_until(lambda: gone() == before + 1)
    for sim in stage.sims:
        sim.fail("none")


def kvgate(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of kvgate to its end."""
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", *words)
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("command", "shows"), [("queue", "pool kvgate-sim"), ("doctor", "1 gateway,")])
def test_commands_trust_the_authority_that_ssl_cert_file_names(
    command: str, shows: str, url: str, files: tuple[Path, Path], open_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [command, "--gateway", url, *(("--redis-url", open_cluster.redis_url) if command == "doctor" else ())]
    refused = "self-signed certificate"
    ended = kvgate(*words)
    assert refused in ended.stdout + ended.stderr
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    ended = kvgate(*words)
    assert refused not in ended.stdout + ended.stderr
    assert shows in ended.stdout


def test_the_consoles_cookie_is_for_tls_only(
    client: httpx.Client, folder: Path, files: tuple[Path, Path], guarded_cluster: Cluster
) -> None:
    config = {"tls": named(files), "security": GUARDED["security"]}
    with running_gateway(folder, guarded_cluster.redis_url, guarded_cluster.replicas, config) as own:
        answer = client.post(f"{own}/console/login", data={"key": "secret-root"})
    assert "; secure" in answer.headers["set-cookie"].lower()


def test_a_new_certificate_is_shown_without_a_restart_and_a_bad_one_is_not(
    client: httpx.Client, url: str, folder: Path, files: tuple[Path, Path]
) -> None:
    before = files[0].read_bytes()
    assert client.get(f"{url}/health").status_code == 200
    renewed = self_signed(folder, "renewed", "127.0.0.1")
    log = folder / f"gateway-{urlsplit(url).port}.log"
    shutil.copy(renewed[0], files[0])  # the key is still the one before
    wait_until(lambda: "certificate not loaded" in log.read_text())
    assert shown(url) == before
    shutil.copy(renewed[1], files[1])
    wait_until(lambda: shown(url) == renewed[0].read_bytes())
    assert client.get(f"{url}/health").status_code == 200, "the open connection goes on"


def test_a_key_of_another_kind_is_shown_after_a_renewal(folder: Path, open_cluster: Cluster) -> None:
    own = self_signed(folder, "curve", "127.0.0.1", ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"))
    config = {"tls": named(own)}
    with running_gateway(folder, open_cluster.redis_url, open_cluster.replicas, config) as url:
        assert shown(url) == own[0].read_bytes()
        renewed = self_signed(folder, "renewed-rsa", "127.0.0.1")
        for old, new in zip(own, renewed, strict=True):
            shutil.copy(new, old)
        wait_until(lambda: shown(url) == renewed[0].read_bytes())


def test_a_gateway_stops_although_clients_keep_idle_connections(
    client: httpx.Client, folder: Path, files: tuple[Path, Path], open_cluster: Cluster
) -> None:
    config = {"tls": named(files)}
    with running_gateway(folder, open_cluster.redis_url, open_cluster.replicas, config) as url:
        assert client.get(f"{url}/health").status_code == 200
        log = folder / f"gateway-{urlsplit(url).port}.log"
    assert "gateway stopped" in log.read_text(), "it was killed: TLS waits half a minute for a client's farewell"


@pytest.mark.parametrize("what", ["missing", "of another key"])
def test_a_gateway_does_not_start_without_its_certificate(folder: Path, what: str) -> None:
    own = self_signed(folder, "own", "127.0.0.1")
    other = self_signed(folder, "other", "127.0.0.1")
    certificate = folder / "nowhere.crt" if what == "missing" else other[0]
    file = folder / "bad.yaml"
    config = {"host": "127.0.0.1", "port": free_ports(1)[0], "tls": named((certificate, own[1]))}
    file.write_text(yaml.safe_dump(config))
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", "gateway", "--config", str(file))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    expected = (
        f"tls.certificate: cannot read {certificate}" if what == "missing" else "are not a certificate and its key"
    )
    assert expected in ended.stderr


@dataclass
class Front:
    """A replica that is reached over TLS, and wants to see a certificate."""

    id: str
    url: str


@contextmanager
def tls_front(sim: SimReplica, own: tuple[Path, Path], client: Path) -> Iterator[Front]:
    """Passes connections on to a simulated replica."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(client))
    context.load_cert_chain(*own)
    context.verify_mode = ssl.CERT_REQUIRED
    told: queue.Queue[tuple[int, Callable[[], object]]] = queue.Queue()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", sim.port)
        try:
            await asyncio.gather(_copied(reader, forth), _copied(back, writer), return_exceptions=True)
        finally:  # one of the two may have ended with an error, or both with the server
            forth.close()
            writer.close()

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        async with await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context) as server:
            told.put((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(over.set)))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    port, end = told.get(timeout=10)
    try:
        yield Front(sim.id, f"https://127.0.0.1:{port}")
    finally:
        end()
        thread.join()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    writer.close()


def test_a_replica_that_wants_a_certificate_gets_it_from_gateways_and_agents(
    folder: Path, open_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, client = self_signed(folder, "replica", "127.0.0.1"), self_signed(folder, "client", "client")
    monkeypatch.setenv("SSL_CERT_FILE", str(own[0]))
    model = ("--model", "org/behind-tls", "--served-name", "sim")
    showing = {"replica_tls": named(client)}
    with running_sims(folder, {"s0": model}) as [sim], tls_front(sim, own, client[0]) as front:
        with running_gateway(folder, open_cluster.redis_url, [front], {}, wait=False) as url:
            unready = httpx.get(f"{url}/ready").json()
            assert "if it wants to see a certificate, set replica_tls" in str(unready)
        monkeypatch.setenv("KVGATE_REPLICA_TLS_CERTIFICATE", str(client[0]))
        monkeypatch.setenv("KVGATE_REPLICA_TLS_KEY", str(client[1]))
        with (
            running_agent(folder, open_cluster.redis_url, front),
            running_gateway(folder, open_cluster.redis_url, [front], showing) as url,
        ):
            answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(fresh()), timeout=20)
            assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, "s0")
            wait_until(lambda: httpx.get(f"{url}/ready").json()["exact"] == ["s0"])
            config = folder / f"gateway-{urlsplit(url).port}.yaml"
            for name in ("KVGATE_REPLICA_TLS_CERTIFICATE", "KVGATE_REPLICA_TLS_KEY"):
                monkeypatch.delenv(name)
            ended = kvgate("doctor", "--config", str(config), "--gateway", url, "--json")
            assert not [one for one in json.loads(ended.stdout)["findings"] if one["subject"] == "replica s0"]
