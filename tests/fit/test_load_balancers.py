"""Each load balancer of docs/how-to/load-balancers.md in front of two gateways: what it must do, and must not."""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from bench.cluster import Cluster, Daemon, running_cluster
from tests.api.stage import chat_body, fresh, running_gateway
from tests.certificates import self_signed
from tests.documents import section
from tests.fit.balancers import BALANCERS, Balancer, running_balancer
from tests.polling import wait_until
from tests.threaded_server import SilentHandler, in_thread

pytestmark = pytest.mark.fit
CHAT = "/v1/chat/completions"
CLIENTS, REQUESTS = 8, 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = {"redis": {"budget_ms": 500}}
    with running_cluster(gateways=2, replicas=3, replica_arguments=("--speed", "20"), config=config) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=BALANCERS, ids=lambda each: each.name)
def balancer(request: pytest.FixtureRequest) -> Balancer:
    balancer: Balancer = request.param
    if balancer.program is None:
        pytest.skip(f"needs {balancer.name}")
    return balancer


@pytest.fixture(scope="module")
def url(balancer: Balancer, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(balancer.name)
    with running_balancer(balancer, folder, cluster.gateway_urls) as url:
        yield url


def ask(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}{CHAT}", json=chat_body(fresh(), **fields), timeout=30, trust_env=False)


def metric(gateway: str, start: str, label: str = "") -> float:
    """The sum of the series that begin so, and have this label."""
    lines = httpx.get(f"{gateway}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start) and label in line)


def hung_up(cluster: Cluster) -> float:
    """How many clients have hung up, as the gateways know."""
    return sum(metric(url, "kvgate_client_disconnects_total ") for url in cluster.gateway_urls)


def served(cluster: Cluster) -> float:
    """How many requests the first gateway has answered."""
    return metric(cluster.gateway_urls[0], "kvgate_requests_total{", f'path="{CHAT}"')


def asked(url: str) -> set[str]:
    """The gateways that it asks now."""
    return {httpx.get(f"{url}/ready", timeout=5, trust_env=False).json()["gateway"].partition(".")[0] for _ in range(8)}


def test_tokens_come_at_once_and_a_client_that_hangs_up_is_noticed(url: str, cluster: Cluster) -> None:
    for sim in cluster.replicas:
        sim.fail("hang", after_tokens=3)
    body = chat_body(fresh(), stream=True, max_tokens=20)
    with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=10, trust_env=False) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert len([next(lines) for _ in range(3)]) == 3, "the engine has stopped in the middle of its answer"
        before = hung_up(cluster)
    wait_until(lambda: hung_up(cluster) == before + 1)  # so its replica is free
    for sim in cluster.replicas:
        sim.fail("none")


def test_a_body_of_10_mb_passes(url: str) -> None:
    assert ask(url, user="x" * 10_000_000).status_code == 200


def test_both_gateways_are_asked(url: str) -> None:
    wait_until(lambda: asked(url) == {"gw0", "gw1"})


@contextmanager
def started_again(gateway: Daemon) -> Iterator[None]:
    try:
        yield
    finally:
        gateway.start()


def test_a_gateway_that_is_drained_loses_no_request(url: str, cluster: Cluster) -> None:
    leaving = cluster.gateway_processes[1]
    with ThreadPoolExecutor(CLIENTS) as clients, started_again(leaving):
        answers = [clients.submit(ask, url, max_tokens=30, stream=number % 2 == 0) for number in range(REQUESTS)]
        wait_until(lambda: sum(answer.done() for answer in answers) >= CLIENTS)
        leaving.stop()
        assert [answer.result().status_code for answer in answers] == [200] * REQUESTS
    assert all("[DONE]" in answer.result().text for answer in answers[::2])
    wait_until(lambda: asked(url) == {"gw0", "gw1"})


def test_requests_after_the_death_of_a_gateway_go_to_the_other(url: str, cluster: Cluster) -> None:
    with started_again(dead := cluster.gateway_processes[0]):
        dead.kill()
        assert [ask(url).status_code for _ in range(20)] == [200] * 20
    wait_until(lambda: asked(url) == {"gw0", "gw1"})


def take_out_the_first(balancer: Balancer, program: str, folder: Path, gateways: Sequence[str]) -> None:
    """Does what the document says."""
    ((old, new, told),) = rows_of("Taking a gateway out", program)
    file, address = folder / balancer.files[0], gateways[0].removeprefix("http://")
    old, new = (words.strip("`").replace("10.0.0.5:8080", address) for words in (old, new))
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    assert balancer.program is not None
    path = f"{Path(balancer.program).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", told.split("`")[1]], cwd=folder, env=os.environ | {"PATH": path}, check=True)


@pytest.mark.parametrize(("name", "program"), [("nginx", "nginx"), ("haproxy", "HAProxy")])
def test_a_gateway_that_is_taken_out_ends_its_answers_and_gets_no_new_ones(
    name: str, program: str, cluster: Cluster, tmp_path: Path
) -> None:
    balancer = installed(name)

    def answering(gateway: str) -> float:
        return metric(gateway, "kvgate_requests_in_flight")

    with (
        running_balancer(balancer, tmp_path, cluster.gateway_urls) as url,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        wait_until(lambda: asked(url) == {"gw0", "gw1"})
        long = [clients.submit(ask, url, max_tokens=3000, stream=True) for _ in range(CLIENTS)]
        wait_until(lambda: all(answering(gateway) for gateway in cluster.gateway_urls))
        take_out_the_first(balancer, program, tmp_path, cluster.gateway_urls)
        wait_until(lambda: asked(url) == {"gw1"})
        under_way = answering(cluster.gateway_urls[0])
        before = served(cluster)
        assert under_way > 0, "its answers go on"
        assert [ask(url).status_code for _ in range(10)] == [200] * 10
        assert all("[DONE]" in answer.result().text for answer in long)
        assert served(cluster) - before <= under_way, "it has ended its answers, and got no other request"
        with started_again(leaving := cluster.gateway_processes[0]):
            leaving.stop()
            assert [ask(url).status_code for _ in range(10)] == [200] * 10


def rows_of(title: str, program: str) -> list[list[str]]:
    """What the document says of a program in the tables of a section, without the program's name."""
    rows = section("how-to/load-balancers.md", title).splitlines()
    return [row.strip("| ").split(" | ")[1:] for row in rows if row.startswith(f"| {program} ")]


def lines_for_tls(program: str) -> dict[str, str]:
    """What the document says to write in its file in place of what."""
    return {old.strip("`"): new.strip("`") for old, new in rows_of("TLS", program)}


def installed(name: str) -> Balancer:
    """The balancer of this name. Without its program, the test is skipped."""
    (balancer,) = (each for each in BALANCERS if each.name == name)
    if balancer.program is None:
        pytest.skip(f"needs {name}")
    return balancer


def certificate_of_balancer(folder: Path) -> Path:
    """A certificate in the files that the document names."""
    certificate, key = self_signed(folder, "tls", "127.0.0.1")
    (folder / "tls.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate


@pytest.mark.parametrize(("name", "program"), [("nginx", "nginx"), ("haproxy", "HAProxy")])
def test_tls_ends_at_the_balancer_and_goes_on_to_the_gateways(
    name: str, program: str, cluster: Cluster, tmp_path: Path
) -> None:
    balancer = installed(name)
    own = certificate_of_balancer(tmp_path)
    behind = self_signed(tmp_path, "ca", "kvgate.example.com")
    instead = {old: new.replace("/etc/kvgate", str(tmp_path)) for old, new in lines_for_tls(program).items()}
    config = {"tls": {"certificate": str(behind[0]), "key": str(behind[1])}}
    with (
        running_gateway(tmp_path, cluster.redis_url, cluster.replicas, config) as first,
        running_gateway(tmp_path, cluster.redis_url, cluster.replicas, config) as second,
        running_balancer(balancer, tmp_path, [first, second], instead) as url,
        httpx.Client(verify=ssl.create_default_context(cafile=str(own)), trust_env=False, timeout=30) as client,
    ):
        assert url.startswith("https")
        answers = [client.post(f"{url}{CHAT}", json=chat_body(fresh(), stream=True)) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        other = self_signed(tmp_path, "other", "kvgate.example.com")
        with running_balancer(
            balancer,
            tmp_path,
            [first, second],
            {old: new.replace(str(behind[0]), str(other[0])) for old, new in instead.items()},
            is_ready=False,
        ) as url:
            assert client.get(f"{url}/ready").status_code in (502, 503), "it trusts another authority only"


@pytest.mark.parametrize(("name", "program"), [("nginx", "nginx"), ("haproxy", "HAProxy")])
def test_a_balancer_that_ends_tls_tells_gateways_that_the_client_has_it(
    name: str, program: str, tmp_path: Path
) -> None:
    balancer = installed(name)
    certificate_of_balancer(tmp_path)
    old, new = next((old, new) for old, new in lines_for_tls(program).items() if "8000" in old)
    with in_thread(FakeServer()) as fake:
        gateways = [f"http://127.0.0.1:{fake.server_port}"] * 2
        instead = {old: new.replace("/etc/kvgate", str(tmp_path))}
        with running_balancer(balancer, tmp_path, gateways, instead) as url:
            httpx.get(f"{url}/console", headers={"x-forwarded-proto": "http"}, trust_env=False, verify=False)
    assert fake.schemes == ["https"]


class Fake(SilentHandler):
    """A gateway that reads requests and hangs up, or that is not ready."""

    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/console":
            self.server.schemes.append(self.headers["x-forwarded-proto"])
        self.send_response(200 if self.server.is_ready else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.seen += 1
        self.close_connection = True


class FakeServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Fake)
        self.is_ready = True
        self.seen = 0
        self.schemes: list[str] = []
        self.lock = threading.Lock()


def test_a_request_that_a_gateway_has_read_is_not_sent_to_another(
    balancer: Balancer, cluster: Cluster, tmp_path: Path
) -> None:
    with (
        in_thread(FakeServer()) as fake,
        running_balancer(balancer, tmp_path, [cluster.gateway_urls[0], f"http://127.0.0.1:{fake.server_port}"]) as url,
    ):
        before = served(cluster)
        statuses = [ask(url).status_code for _ in range(12)]
        assert fake.seen == sum(status >= 500 for status in statuses) > 0
        assert served(cluster) - before == statuses.count(200) == 12 - fake.seen


def test_a_gateway_that_is_not_ready_is_not_asked(balancer: Balancer, cluster: Cluster, tmp_path: Path) -> None:
    if not balancer.has_checks:
        pytest.skip(f"{balancer.name} asks no /ready")
    with (
        in_thread(FakeServer()) as fake,
        running_balancer(balancer, tmp_path, [cluster.gateway_urls[0], f"http://127.0.0.1:{fake.server_port}"]) as url,
    ):
        fake.is_ready = False
        ready = f"{url}/ready"
        wait_until(lambda: [httpx.get(ready, trust_env=False).status_code for _ in range(30)] == [200] * 30)
        assert [ask(url).status_code for _ in range(10)] == [200] * 10
        assert fake.seen == 0
