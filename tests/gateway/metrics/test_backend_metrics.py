"""What a gateway counts of each backend of a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.metrics.gateway_metrics import Metrics
from tests.gateway.scripted import ASKED, CHAT, ScriptedReplica, chunk, gateway_before, head, whole

STREAM = ("content-type: text/event-stream", "transfer-encoding: chunked")
FIRST = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
USAGE = {"prompt_tokens": 50, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 20}}
LAST = b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % orjson.dumps(USAGE)

Counts = dict[tuple[str, ...], float]


class Stage(NamedTuple):
    http: httpx.AsyncClient
    gateway: Gateway
    replica: ScriptedReplica
    records: list[dict[str, Any]]

    async def ask(self, **fields: Any) -> None:
        await self.http.post(CHAT, json={**ASKED, "model": "chat", **fields})

    def counts(self, name: str, *labels: str) -> Counts:
        return counts(self.gateway.metrics, name, *labels)


def counts(metrics: Metrics, name: str, *labels: str) -> Counts:
    """The values of a metric, by these labels; those of 0 are left out."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(each.labels[label] for label in labels): each.value for each in samples if each.value}


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """All requests of the model go to `v1`: there is no replica of `v2`."""
    replica, records = ScriptedReplica(), list[dict[str, Any]]()
    backends = [{"name": "v1", "match": {"model": "m"}}, {"name": "v2", "match": {"model": "n"}}]
    models = [{"name": "chat", "aliases": ["old"], "backends": backends}]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(replica.running())
        gateway, url = await stack.enter_async_context(gateway_before(replica, models=models))
        gateway.proxy._recorder.sinks.append(records.append)
        yield Stage(await stack.enter_async_context(httpx.AsyncClient(base_url=url)), gateway, replica, records)


async def test_requests_first_tokens_and_tokens_count_at_their_backend(stage: Stage) -> None:
    stage.replica.says(head(*STREAM), chunk(FIRST + LAST), chunk(b""))
    await stage.ask(stream=True)
    await stage.ask(stream=True, model="old")
    stage.replica.says(whole(b'{"error":{}}', "connection: close", status=400))
    await stage.ask()
    assert stage.counts("kvgate_backend_requests_total", "model", "backend", "status") == {
        ("chat", "v1", "200"): 2,
        ("chat", "v1", "400"): 1,
    }
    assert stage.counts("kvgate_backend_first_token_seconds_count", "model", "backend") == {("chat", "v1"): 2}
    assert stage.counts("kvgate_backend_tokens_total", "model", "backend", "kind") == {
        ("chat", "v1", "prompt"): 100,
        ("chat", "v1", "cached"): 40,
        ("chat", "v1", "output"): 6,
    }
    assert {(each["placed_as"], each["backend"]) for each in stage.records} == {("chat", "v1")}


async def test_an_answer_that_breaks_off_is_no_success(stage: Stage) -> None:
    stage.replica.says(head(*STREAM), chunk(FIRST))
    await stage.ask(stream=True)
    assert stage.counts("kvgate_backend_requests_total", "status") == {("broken",): 1}


async def test_a_model_without_backends_has_none_of_these_metrics(stage: Stage) -> None:
    await stage.ask(model="m")
    assert not stage.counts("kvgate_backend_requests_total", "model")
    assert (stage.records[-1]["placed_as"], stage.records[-1]["backend"]) == ("m", None)


def test_backends_beyond_the_hundredth_share_one_name() -> None:
    metrics = Metrics()
    for number in range(102):
        metrics.backends.note("chat", f"b{number}", "200", None, {})
    found = counts(metrics, "kvgate_backend_requests_total", "backend")
    assert len(found) == 101
    assert found["others",] == 2
