"""A gateway's spans, as a receiver of OTLP gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.echo import MODEL, running_echo, sent
from tests.api.stage import Stage, chat_body, fresh, running_gateway
from tests.otlp import Receiver
from tests.polling import wait_until
from tests.threaded_server import in_thread

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def received() -> Iterator[Receiver]:
    with in_thread(Receiver()) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracing")


@pytest.fixture
def log(folder: Path, url: str) -> Path:
    return folder / f"gateway-{urlsplit(url).port}.log"


@pytest.fixture(scope="module")
def url(received: Receiver, open_cluster: Cluster, folder: Path) -> Iterator[str]:
    """Another gateway of the open cluster, which traces the requests whose clients want it."""
    config = {"tracing": {"endpoint": received.url, "sample_ratio": 0}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms between batches
        with running_gateway(folder, open_cluster.redis_url, open_cluster.replicas, config) as url:
            yield url


def traced(number: int) -> tuple[str, dict[str, str]]:
    trace = f"{number:032x}"
    return trace, {"traceparent": f"00-{trace}-{PARENT}-01"}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_each_step_of_a_request_is_a_span_of_the_clients_trace(
    url: str, received: Receiver, stage: Stage, stream: bool
) -> None:
    trace, headers = traced(1 + stream)
    headers["x-request-id"] = fresh("traced")
    canary = fresh("canary")
    body = chat_body(canary * 50, stop=["canary-stop"])
    first = stage.http.post(f"{url}/v1/chat/completions", json=body | {"stream": stream})
    answer = stage.http.post(f"{url}/v1/chat/completions", json=body | {"stream": stream}, headers=headers)
    assert (first.status_code, answer.status_code) == (200, 200)
    wait_until(lambda: len(received.of(trace)) == 5)
    spans = {span["name"]: span for span in received.of(trace)}
    root, attempt = spans["chat sim"], spans["attempt"]
    assert root["parent"] == PARENT
    assert spans["place"]["parent"] == attempt["parent"] == root["id"]
    assert spans["first byte"]["parent"] == spans["relay"]["parent"] == attempt["id"]
    assert root["took_ns"] >= attempt["took_ns"] >= spans["first byte"]["took_ns"] > 0
    assert root["resource"]["service.name"] == "kvgate"
    assert (root["gen_ai.operation.name"], root["gen_ai.request.model"]) == ("chat", "sim")
    assert root["gen_ai.response.model"] == "sim"
    assert root["gen_ai.usage.input_tokens"] > 100
    assert root["gen_ai.usage.output_tokens"] == 4
    assert root["gen_ai.usage.cache_read.input_tokens"] > 100
    assert root["gen_ai.response.finish_reasons"] == ["length"]
    assert (root["kvgate.request_id"], root["http.response.status_code"]) == (headers["x-request-id"], 200)
    assert root["kvgate.replica"] == attempt["kvgate.replica"] == answer.headers["x-kvgate-replica"]
    assert spans["place"]["kvgate.decision"] == answer.headers["x-kvgate-decision"]
    assert (root["kvgate.why"], root["kvgate.policy"]) == ("hit", "prefix_kv_aware")
    candidates = json.loads(root["kvgate.candidates"])
    assert sorted(each["replica"] for each in candidates) == ["r0", "r1", "r2"]
    assert min(candidates, key=itemgetter("cost"))["replica"] == root["kvgate.replica"]
    assert canary not in str(received.of(trace))


def test_the_replica_gets_the_attempt_as_its_parent(received: Receiver, open_cluster: Cluster, tmp_path: Path) -> None:
    config = {"tracing": {"endpoint": received.url, "sample_ratio": 0}}
    trace, headers = traced(7)
    with (
        running_echo("e0") as echo,
        running_gateway(tmp_path, open_cluster.redis_url, [echo], config) as url,
    ):

        def asked(headers: dict[str, str]) -> dict[str, str]:
            body = {**chat_body(fresh()), "model": MODEL}
            return sent(httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20)).headers

        got = asked({**headers, "tracestate": "a=b"})
        wait_until(lambda: any(span["name"] == "attempt" for span in received.of(trace)))
        (attempt,) = [span for span in received.of(trace) if span["name"] == "attempt"]
        assert (got["traceparent"], got["tracestate"]) == (f"00-{trace}-{attempt['id']}-01", "a=b")
        left_out = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert asked(left_out)["traceparent"] == left_out["traceparent"], "its client has decided against it"
        assert asked({})["traceparent"].endswith("-00"), "its replica does not trace it, either"
        assert "tracestate" not in asked({"traceparent": "garbage", "tracestate": "a=b"})
        assert "tracestate" not in asked({**headers, "tracestate": "a=b,garbage"})
        later_version = {"traceparent": f"01-{traced(8)[0]}-{PARENT}-03-more"}
        assert asked(later_version)["traceparent"].endswith("-03"), "its id is random, and it is told so"
    assert received.of(TRACE) == []


def test_failed_attempts_and_refusals_are_told(url: str, received: Receiver, stage: Stage) -> None:
    trace, headers = traced(3)
    for sim in stage.sims:
        sim.fail("error", count=-1)
    answer = stage.http.post(f"{url}/v1/chat/completions", json=chat_body(fresh()), headers=headers)
    for sim in stage.sims:
        sim.fail("none")
    assert answer.status_code == 500
    wait_until(lambda: any(span["name"] == "chat sim" for span in received.of(trace)))
    attempts = [span for span in received.of(trace) if span["name"] == "attempt"]
    assert len({span["kvgate.replica"] for span in attempts}) == len(attempts) >= 2
    assert {span["error.type"] for span in attempts} == {"status_500"}
    trace, headers = traced(4)
    stage.http.post(f"{url}/v1/chat/completions", json={"model": "unknown"}, headers=headers)
    wait_until(lambda: received.of(trace))
    (root,) = received.of(trace)
    assert (root["error.type"], root["http.response.status_code"]) == ("model_not_found", 404)


def test_garbage_in_a_traceparent_is_none(url: str, received: Receiver, stage: Stage) -> None:
    sampled = f"00-{TRACE}-{PARENT}-01"
    nearly = [sampled.replace(part, "0" * len(part)) for part in (TRACE, PARENT)]
    nearly += [f"ff{sampled[2:]}", f"{sampled}-more", f"00-{TRACE}-{PARENT}", f"00-{TRACE}-{PARENT}-zz"]
    for garbage in ("garbage1", "x" * 4000, "é-01", *nearly):
        headers = {"traceparent": garbage.encode(), "tracestate": b"a=b " + b" " * 4000 + b"x"}
        answer = stage.http.post(f"{url}/v1/chat/completions", json=chat_body(fresh()), headers=headers)
        assert answer.status_code == 200
    trace, _ = traced(5)
    flagged = {"traceparent": f"00-{trace}-{PARENT}-05"}  # among other flags
    stage.http.post(f"{url}/v1/chat/completions", json=chat_body(fresh()), headers=flagged)
    wait_until(lambda: any(span["name"] == "chat sim" for span in received.of(trace)))
    assert received.of(TRACE) == []


def test_requests_go_on_while_the_receiver_fails_and_their_spans_come_later(
    url: str, received: Receiver, stage: Stage, log: Path
) -> None:
    trace, headers = traced(10)

    def ask() -> None:
        answer = stage.http.post(f"{url}/v1/chat/completions", json=chat_body(fresh()), headers=headers)
        assert answer.status_code == 200

    def told() -> list[dict[str, str]]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line for line in lines if line["event"].startswith("traces ")]

    received.status = 503
    ask()
    wait_until(lambda: received.refused)
    ask()
    assert received.of(trace) == []
    received.status = 200
    wait_until(lambda: len(received.of(trace)) == 10)
    wait_until(lambda: len(told()) == 2)
    failing, again = told()
    assert (failing["event"], failing["reason"]) == ("traces are not sent", "status 503")
    assert (again["event"], again["lost"]) == ("traces are sent again", 0)


def test_what_is_left_is_sent_when_a_gateway_stops_under_the_name_of_the_environment(
    open_cluster: Cluster, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_BSP_SCHEDULE_DELAY", raising=False)  # so nothing is sent before
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-gateways")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging,service.name=not-this")
    with in_thread(Receiver()) as own:
        config = {"tracing": {"endpoint": own.url, "sample_ratio": 1.0}}
        with running_gateway(tmp_path, open_cluster.redis_url, open_cluster.replicas, config) as url:
            assert stage.http.post(f"{url}/v1/chat/completions", json=chat_body(fresh())).status_code == 200
        assert sorted(span["name"] for span in own.spans)[:2] == ["attempt", "chat sim"]
        resource = own.spans[0]["resource"]
    assert resource["service.name"] == "our-gateways"
    assert resource["deployment.environment.name"] == "staging"
    assert resource["service.version"], "what the environment does not name is told as ever"
