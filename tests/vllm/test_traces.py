"""A real engine's own spans belong to the trace of the gateway's request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from bench.cluster import running_gateways
from bench.vllm import install
from bench.vllm.replicas import VllmReplica
from gateway.ops.local.ports import free_ports
from tests.otlp import Receiver
from tests.polling import wait_until
from tests.threaded_server import in_thread

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@dataclass
class Traced(VllmReplica):
    """An engine that sends its spans."""

    receiver: str = ""

    def command(self) -> list[str]:
        return [*super().command(), "--otlp-traces-endpoint", self.receiver]


@pytest.fixture(scope="module")
def received() -> Iterator[Receiver]:
    with in_thread(Receiver()) as server:
        yield server


@pytest.fixture(scope="module")
def gateways(received: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    log, (port, events, replay) = tmp_path_factory.mktemp("traces") / "r0.log", free_ports(3)
    engine = Traced("r0", port, log, events, replay, 256, install.TINY, receiver=received.url)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # vLLM's default is gRPC
        engine.start()
    try:
        engine.wait_until_healthy()
        config = {"health": {"timeout_s": 5}, "tracing": {"endpoint": received.url, "sample_ratio": 1.0}}
        with running_gateways({engine.id: engine.url}, gateways=2, config=config) as cluster:
            yield cluster.gateway_urls
    finally:
        engine.kill()


def test_the_engines_span_is_a_child_of_the_attempt(gateways: list[str], received: Receiver) -> None:
    model = httpx.get(f"{gateways[0]}/v1/models").json()["data"][0]["id"]
    for url in gateways:
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Whose span is this?"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    wait_until(lambda: len([span for span in received.spans if span["name"] == "llm_request"]) == 2, within_s=60)
    for span in (span for span in received.spans if span["name"] == "llm_request"):
        wait_until(lambda trace=span["trace"]: "attempt" in {each["name"] for each in received.of(trace)})
        (attempt,) = (each for each in received.of(span["trace"]) if each["name"] == "attempt")
        assert span["parent"] == attempt["id"]
        assert span["gen_ai.usage.completion_tokens"] == 4
