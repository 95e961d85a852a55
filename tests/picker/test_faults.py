"""What clients of an Envoy that asks pickers see when a replica, a picker or Redis dies, hangs or lies."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest

from bench.cluster import Cluster, SimReplica, running_cluster
from bench.envoy import PASSES
from bench.pickers import Picker, is_ready, running_pickers
from gateway.picker.messages import ProcessingRequest, ProcessingResponse
from gateway.picker.service import SERVICE
from tests.api.stage import chat_body, text
from tests.picker.stage import CHAT, ask, is_idle, replica_of, running_envoy, stream, words_of
from tests.polling import wait_until
from tests.programs import needs
from tests.redis_server import running_redis

pytestmark = needs("envoy")
REQUESTS, CLIENTS = 40, 8


@pytest.fixture
def struck(url: str, cluster: Cluster) -> Iterator[tuple[str, SimReplica]]:
    """A prompt, and the replica that it goes to. What is done to the replica is undone."""
    prompt = text()
    sim = replica_of(cluster, ask(url, prompt))
    yield prompt, sim
    sim.signal(signal.SIGCONT)
    sim.fail("none")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("fault", ["error", "reset"])
def test_another_replica_answers_in_the_place_of_one_that_fails(
    url: str, struck: tuple[str, SimReplica], fault: str, is_streamed: bool
) -> None:
    prompt, sim = struck
    sim.fail(fault)
    answer = ask(url, prompt, stream=is_streamed, max_tokens=10)
    assert answer.status_code == 200
    assert answer.headers["x-kvgate-replica"] != sim.id
    assert len(words_of(answer.text)) == 10 if is_streamed else answer.json()["usage"]["completion_tokens"] == 10


def test_another_replica_answers_in_the_place_of_one_that_freezes(url: str, struck: tuple[str, SimReplica]) -> None:
    prompt, sim = struck
    sim.signal(signal.SIGSTOP)
    answer = ask(url, prompt, stream=True, max_tokens=10)
    assert (answer.status_code, len(words_of(answer.text))) == (200, 10)
    assert answer.headers["x-kvgate-replica"] != sim.id


def test_an_error_of_all_replicas_is_passed_on(url: str, cluster: Cluster) -> None:
    for sim in cluster.replicas:
        sim.fail("error", count=-1)
    answer = ask(url)
    for sim in cluster.replicas:
        sim.fail("none")
    assert answer.status_code == 500
    assert "Simulated failure" in answer.json()["error"]["message"]


def test_a_large_answer_that_breaks_off_never_looks_complete(url: str, cluster: Cluster) -> None:
    body = {"model": "sim", "input": [text(), *("x" for _ in range(4000))]}

    def ask_for_all() -> httpx.Response:
        return httpx.post(f"{url}/v1/embeddings", json=body, timeout=30, trust_env=False)

    first = replica_of(cluster, ask_for_all())
    for sim in cluster.replicas:
        sim.fail("error") if sim is first else sim.fail("cut", count=-1)
    try:
        answer = ask_for_all()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "stream_broken")
    except httpx.RemoteProtocolError:
        pass  # Envoy had begun to give it
    finally:
        for sim in cluster.replicas:
            sim.fail("none")


def test_an_answer_that_envoy_gives_before_it_knows_a_replica_passes(pickers: list[Picker], tmp_path: Path) -> None:
    idle = "stream_idle_timeout: 960s"
    begun = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
    with running_envoy(pickers, tmp_path, {idle: f"{idle}\n                request_timeout: 0.5s"}) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=30) as client:
            client.sendall(begun)
            head = client.recv(1000)
    assert b"408 Request Timeout" in head
    assert b"x-request-id" not in head, "the picker would have waited longer"


def test_a_proxy_that_leaves_in_the_middle_of_a_request_is_no_error(own: Cluster, tmp_path: Path) -> None:
    head, body, has_left = ProcessingRequest(), ProcessingRequest(), threading.Event()
    for name, value in ((":method", "POST"), (":path", CHAT), ("content-type", "application/json")):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body.request_body.body = orjson.dumps(chat_body("x", user="x" * 6_000_000))
    body.request_body.end_of_stream = True

    def told() -> Iterator[Any]:
        yield from (head, body)
        has_left.wait()

    with running_pickers(own, tmp_path, 1, tls="off") as (picker,):
        with grpc.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
            process = channel.stream_stream(
                f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
            )
            for _ in range(8):  # it is a matter of luck in which order the picker learns it
                heard = process(told())
                assert [next(heard).WhichOneof("of") for _ in range(5)] == ["request_headers", *["request_body"] * 4]
                heard.cancel()
            has_left.set()
        wait_until(lambda: picker.metric("kvgate_requests_total", 'status="499"') == 8)
        assert '"level": "error"' not in picker.configs[-1].with_suffix(".log").read_text()


@pytest.mark.parametrize("fault", ["error", "truncate"])
def test_a_stream_that_the_picker_reads_goes_on_at_another_replica(
    cluster: Cluster, pickers: list[Picker], tmp_path: Path, fault: str
) -> None:
    with running_envoy(pickers, tmp_path) as url:
        prompt = text()
        whole = ask(url, prompt, stream=True, max_tokens=20)
        replica_of(cluster, whole).fail(fault, after_tokens=3)
        resumed = ask(url, prompt, stream=True, max_tokens=20)
        assert words_of(resumed.text) == words_of(whole.text)
        assert ": x-kvgate-resumed: 1; exact" in resumed.text


def test_envoy_breaks_a_stream_whose_replica_dies_and_nothing_is_left(url: str, cluster: Cluster) -> None:
    with stream(url, max_tokens=400) as answer:
        dead = replica_of(cluster, answer)
        dead.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()
    assert [ask(url).status_code for _ in range(4)] == [200] * 4
    dead.start()
    dead.wait_until_ready()
    wait_until(lambda: is_idle(cluster))


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A cluster whose pickers and Redis may die."""
    with running_cluster(gateways=1, replicas=3, replica_arguments=("--speed", "5")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four(own: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Picker]]:
    with running_pickers(own, tmp_path_factory.mktemp("four"), 4) as pickers:
        yield pickers


def all_of(url: str, strike: Any) -> list[Any]:
    """Many requests, half of them streams. In the middle of them, `strike` is called."""

    def one(number: int) -> Any:
        try:
            answer = ask(url, max_tokens=60, stream=number % 2 == 0)
            is_whole = "[DONE]" in answer.text if number % 2 == 0 else answer.status_code == 200
            return answer.status_code if is_whole else "broken"
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(one, number) for number in range(REQUESTS)]
        wait_until(lambda: sum(answer.done() for answer in answers) >= CLIENTS)
        strike()
        return [answer.result() for answer in answers]


@pytest.fixture
def victim(four: list[Picker]) -> Iterator[Picker]:
    yield four[0]
    four[0].start()
    wait_until(lambda: is_ready(four[0].url))


def test_no_request_fails_when_a_picker_that_is_done_with_answers_heads_dies(
    own: Cluster, four: list[Picker], victim: Picker, tmp_path: Path
) -> None:
    with running_envoy(four, tmp_path, PASSES) as url:
        opened = [stream(url, max_tokens=200) for _ in range(8)]
        answers = [each.__enter__() for each in opened]
        victim.end()
        assert all(len(words_of("".join(answer.iter_text()))) == 200 for answer in answers)
        for each in opened:
            each.__exit__(None, None, None)
        assert [ask(url).status_code for _ in range(12)] == [200] * 12
    wait_until(lambda: is_idle(own))


@pytest.mark.parametrize("is_open", ["true", "false"], ids=["Envoy fails open", "Envoy fails closed"])
def test_a_picker_that_dies_takes_only_what_it_was_reading(
    own: Cluster, four: list[Picker], victim: Picker, tmp_path: Path, is_open: str
) -> None:
    with running_envoy(four, tmp_path, {"failure_mode_allow: true": f"failure_mode_allow: {is_open}"}) as url:
        results = all_of(url, victim.end)
        broken = [each for each in results if each != 200]
        assert len(broken) <= CLIENTS, "no more than ran at that moment"
        assert [ask(url).status_code for _ in range(12)] == [200] * 12
    wait_until(lambda: is_idle(own))


def test_a_picker_that_is_told_to_stop_ends_its_answers_first(
    own: Cluster, four: list[Picker], victim: Picker, tmp_path: Path
) -> None:
    with running_envoy(four, tmp_path) as url:
        assert all_of(url, lambda: victim.end(signal.SIGTERM)) == [200] * REQUESTS
        assert victim.process is not None
        assert victim.process.returncode == 0


def test_answers_that_pass_are_billed_when_their_picker_is_told_to_stop(
    own: Cluster, four: list[Picker], victim: Picker, tmp_path: Path
) -> None:
    def billed() -> tuple[int, int]:
        totals = httpx.get(f"{own.gateway_urls[0]}/v1/usage", trust_env=False).json()["totals"]
        return totals["requests"], totals["errors"]

    requests, errors = billed()
    with running_envoy([victim], tmp_path, PASSES) as url:
        opened = [stream(url, max_tokens=4000) for _ in range(4)]
        for each in opened:
            each.__enter__()
        victim.end(signal.SIGTERM)
        assert billed() == (requests + 4, errors)
        for each in opened:
            each.__exit__(None, None, None)


def test_what_a_stopping_picker_cuts_off_ends_with_an_error(own: Cluster, tmp_path: Path) -> None:
    hurried = {"timeouts": {"grace_s": 1}}
    with (
        running_pickers(own, tmp_path, 1, hurried) as (picker,),
        running_envoy([picker], tmp_path) as url,
        stream(url, max_tokens=4000) as answer,
    ):
        picker.end(signal.SIGTERM)
        assert '"shutting_down"' in answer.read().decode()
    wait_until(lambda: is_idle(own))


def test_a_picker_that_freezes_ends_its_calls_and_gets_no_more(four: list[Picker], tmp_path: Path) -> None:
    with running_envoy(four, tmp_path) as url, ThreadPoolExecutor(CLIENTS) as clients:
        assert [ask(url).status_code for _ in range(12)] == [200] * 12, "so its connections are open"
        frozen = four[1]
        frozen.tell(signal.SIGSTOP)
        calls = [clients.submit(ask, url) for _ in range(CLIENTS)]
        statuses = {call.result(timeout=20).status_code for call in calls}
        assert statuses <= {200, 500}, "none waits until the picker wakes up"
        wait_until(lambda: all(ask_soon(url) for _ in range(24)))
        frozen.tell(signal.SIGCONT)


def test_a_slow_picker_loses_no_request(four: list[Picker], tmp_path: Path) -> None:
    with running_envoy(four, tmp_path) as url, ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, url, max_tokens=20) for _ in range(REQUESTS)]
        while not all(answer.done() for answer in answers):
            four[2].tell(signal.SIGSTOP)
            wait(answers, timeout=0.4)
            four[2].tell(signal.SIGCONT)
            wait(answers, timeout=0.1)
        assert [answer.result().status_code for answer in answers] == [200] * REQUESTS


def ask_soon(url: str) -> bool:
    try:
        return httpx.post(f"{url}/tokenize", json={"model": "sim", "prompt": "x"}, timeout=2).status_code == 200
    except httpx.TimeoutException:
        return False


def test_without_redis_requests_are_answered_and_with_it_again_prefixes_are_followed(tmp_path: Path) -> None:
    with (
        running_redis() as redis,
        running_cluster(gateways=1, replicas=3, replica_arguments=("--speed", "5"), redis_url=redis.url) as cluster,
        running_pickers(cluster, tmp_path, 2) as pickers,
        running_envoy(pickers, tmp_path) as url,
    ):
        redis.kill()
        assert [ask(url).status_code for _ in range(8)] == [200] * 8
        redis.start()
        begin = text()
        wait_until(lambda: int(ask(url, begin).headers["x-kvgate-matched-tokens"]) > 500)
