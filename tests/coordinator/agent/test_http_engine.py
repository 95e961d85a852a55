"""What an agent learns from its engine over HTTP: its event endpoint, its incarnation and its age."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from coordinator.agent.control_client import ControlClient
from coordinator.agent.http_engine import EngineAway, HttpEngine, event_endpoints
from coordinator.keys import pool_slug
from tests.web_server import serving

METRICS = """\
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="300",kv_cache_size_tokens="1600"} 1.0
vllm:num_requests_waiting{engine="0"} 3.0
process_start_time_seconds 1000.5
"""
RANK_1 = """\
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300",kv_cache_size_tokens="3200"} 1.0
vllm:num_requests_waiting{engine="1"} 4.0
"""


def source(port: int, host: str = "*", replays: bool = True) -> dict[str, Any]:
    """The description of one rank's publisher in vLLM 0.32."""
    replay = f"tcp://{host}:{port + 100}" if replays else None
    return {"publisher": "zmq", "endpoint": f"tcp://{host}:{port}", "replay_endpoint": replay, "topic": "kv"}


@dataclass
class Server:
    """A server on this machine. `answers` maps each path to an answer: JSON, a text, or a status without a body."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(
        default_factory=lambda: {
            "/metrics": METRICS,
            "/v1/models": {"data": [{"id": "sim", "root": "org/model"}]},
            "/version": {"version": "0.32.1.dev7+gabc"},
            "/kv_event_sources": {"0": source(5557), "1": source(5558)},
        }
    )

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        said = self.answers.get(request.path, 404)
        match said:
            case int():
                return web.Response(status=said)
            case str():
                return web.Response(text=said)
            case _:
                return web.json_response(said)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    async with serving(app) as server.url:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    client = ControlClient()
    yield client
    await client.close()


async def test_what_it_is_and_where_its_events_are_is_asked_of_it(server: Server, client: ControlClient) -> None:
    snapshot = await HttpEngine(client, server.url).look()
    assert (snapshot.pool, snapshot.url) == (pool_slug("org/model"), server.url)
    assert (snapshot.capacity_tokens, snapshot.block_size) == (1600, 16)
    assert snapshot.started == f"{1000500:x}"
    assert snapshot.version == (0, 32)
    assert (snapshot.events, snapshot.replay) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657")
    assert (snapshot.waiting, snapshot.counters) == (3, {"waiting": 3.0})


async def test_a_rank_has_endpoints_and_figures_of_its_own(server: Server, client: ControlClient) -> None:
    server.answers["/metrics"] = METRICS + RANK_1
    snapshot = await HttpEngine(client, server.url, dp_rank=1).look()
    assert (snapshot.events, snapshot.replay) == ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658")
    assert (snapshot.capacity_tokens, snapshot.waiting) == (3200, 4)


async def test_a_server_of_one_rank_is_that_rank(server: Server, client: ControlClient) -> None:
    server.answers["/metrics"] = RANK_1
    server.answers["/kv_event_sources"] = {"1": source(5558)}
    snapshot = await HttpEngine(client, server.url).look()
    assert snapshot.events == "tcp://127.0.0.1:5558"
    assert (snapshot.capacity_tokens, snapshot.waiting) == (3200, 4)


async def test_a_rank_that_publishes_nothing_has_no_endpoints(server: Server, client: ControlClient) -> None:
    server.answers |= {"/metrics": METRICS + RANK_1, "/kv_event_sources": {"0": source(5557)}}
    assert (await HttpEngine(client, server.url, dp_rank=1).look()).events == ""


async def test_a_rank_that_its_server_does_not_have_is_not_followed(server: Server, client: ControlClient) -> None:
    with pytest.raises(EngineAway, match="dp_rank is 7, but its server has rank 0 only"):
        await HttpEngine(client, server.url, dp_rank=7).look()


SLEEP_METRICS = METRICS + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} %s\n'


async def test_whether_it_sleeps_its_server_tells_and_its_metrics_if_that_does_not(
    server: Server, client: ControlClient
) -> None:
    """Metrics do not tell of a pause. A server without the development mode has no /is_sleeping."""
    engine = HttpEngine(client, server.url)
    server.answers |= {"/metrics": SLEEP_METRICS % 1, "/is_sleeping": {"is_sleeping": True}}
    assert (await engine.look()).is_asleep is True
    server.answers["/is_sleeping"] = {"is_sleeping": False}
    assert (await engine.look()).is_asleep is False
    server.answers["/is_sleeping"] = 500  # it stops
    for _ in range(3):
        await engine.look()
    assert server.asked.count("/is_sleeping") == 4, "an engine that stops is not asked again"
    del server.answers["/is_sleeping"]
    for awake, is_asleep in ((1, False), (0, True)):
        server.answers["/metrics"] = SLEEP_METRICS % awake
        assert (await HttpEngine(client, server.url).look()).is_asleep is is_asleep
    assert server.asked.count("/is_sleeping") == 6, "the last two engines are asked once each"


async def test_an_endpoint_that_names_its_host_stays_as_it_is(server: Server, client: ControlClient) -> None:
    server.answers["/kv_event_sources"] = {"0": source(5557, host="10.1.2.3", replays=False)}
    snapshot = await HttpEngine(client, server.url).look()
    assert (snapshot.events, snapshot.replay) == ("tcp://10.1.2.3:5557", "")


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://gpu7:8000", "gpu7"), ("https://10.0.0.7", "10.0.0.7"), ("http://[fd00::7]:8000", "[fd00::7]")],
)
def test_a_wildcard_becomes_the_replicas_host(url: str, host: str) -> None:
    assert event_endpoints({"0": source(5557)}, url, None) == (f"tcp://{host}:5557", f"tcp://{host}:5657")


async def test_endpoints_that_are_given_win_and_nothing_is_asked(server: Server, client: ControlClient) -> None:
    engine = HttpEngine(client, server.url, events="tcp://h:1", replay="tcp://h:2")
    snapshot = await engine.look()
    assert (snapshot.events, snapshot.replay) == ("tcp://h:1", "tcp://h:2")
    assert "/kv_event_sources" not in server.asked


async def test_an_older_engine_that_knows_neither_path_is_an_engine(server: Server, client: ControlClient) -> None:
    del server.answers["/kv_event_sources"], server.answers["/version"]
    snapshot = await HttpEngine(client, server.url).look()
    assert (snapshot.events, snapshot.replay, snapshot.version) == ("", "", ())


@pytest.mark.parametrize("sources", [{}, [], None, {"0": None}, {"0": {"publisher": "null"}}, "not JSON"])
async def test_sources_that_name_no_endpoint_are_none(server: Server, client: ControlClient, sources: Any) -> None:
    server.answers["/kv_event_sources"] = sources
    assert (await HttpEngine(client, server.url).look()).events == ""


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ({"version": "0.29.0"}, (0, 29)),
        ({"version": "1.2rc1"}, (1, 2)),
        ({"version": "v0.30.0+cpu"}, (0, 30)),
        ({"version": "dev"}, ()),
        ({"version": 3}, ()),
        ({}, ()),
        ([], ()),
    ],
)
async def test_a_version_is_its_first_two_numbers(
    server: Server, client: ControlClient, said: Any, version: tuple[int, ...]
) -> None:
    server.answers["/version"] = said
    assert (await HttpEngine(client, server.url).look()).version == version


async def test_what_holds_for_a_life_is_asked_once_in_it(server: Server, client: ControlClient) -> None:
    engine = HttpEngine(client, server.url)
    await engine.look()
    server.asked.clear()
    await engine.look()
    assert server.asked == ["/metrics"]

    server.answers["/metrics"] = METRICS.replace("1000.5", "2000.5")
    server.answers["/kv_event_sources"] = {"0": source(6000)}
    assert (await engine.look()).events == "tcp://127.0.0.1:6000"


async def test_a_server_without_a_start_time_is_asked_every_time(server: Server, client: ControlClient) -> None:
    server.answers["/metrics"] = 404
    engine = HttpEngine(client, server.url)
    assert (await engine.look()).started == ""
    server.answers["/v1/models"] = {"data": [{"id": "other"}]}
    snapshot = await engine.look()
    assert (snapshot.pool, snapshot.capacity_tokens, snapshot.counters) == (pool_slug("other"), 0, {})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/metrics", 503),
        ("/v1/models", 500),
        ("/v1/models", {"data": []}),
        ("/kv_event_sources", 500),  # "no events" would be wrong until the engine restarts
        ("/version", 502),
    ],
)
async def test_an_engine_that_fails_is_away(server: Server, client: ControlClient, path: str, said: Any) -> None:
    server.answers[path] = said
    with pytest.raises(EngineAway, match=server.url):
        await HttpEngine(client, server.url).look()


async def test_an_engine_that_is_not_there_is_away(client: ControlClient) -> None:
    with pytest.raises(EngineAway, match="refused"):
        await HttpEngine(client, "http://127.0.0.1:9").look()
