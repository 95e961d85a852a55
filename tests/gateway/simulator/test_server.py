from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import pytest

from coordinator.engine.facts import EngineFacts, parse_metrics
from gateway.simulator.server import run
from gateway.simulator.settings import SimSettings
from tests.gateway.simulator.conftest import RunningReplica, StartReplica, cached_tokens_of, until_broken

_METRICS = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:cache_config_info",
    "process_start_time_seconds",
]
_LONG: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 1000,
}


async def metric_lines(replica: RunningReplica) -> dict[str, float]:
    async with replica.http.get("/metrics") as response:
        text = await response.text()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def test_metrics_have_vllms_names_and_count_what_happened(replica: RunningReplica) -> None:
    for _ in range(2):
        await replica.chat("word " * 100, max_tokens=5)
    lines = await metric_lines(replica)
    assert [name for name in _METRICS if not any(line.startswith(name) for line in lines)] == []
    usage = (await replica.chat("word " * 100, max_tokens=5))["usage"]
    labels = '{engine="0",model_name="sim"}'
    assert lines[f"vllm:prefix_cache_queries_total{labels}"] == 2 * usage["prompt_tokens"]
    assert lines[f"vllm:prefix_cache_hits_total{labels}"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert lines[f"vllm:generation_tokens_total{labels}"] == 10
    assert lines['vllm:request_success_total{engine="0",finished_reason="length",model_name="sim"}'] == 2
    assert lines[f"vllm:time_to_first_token_seconds_count{labels}"] == 2
    assert lines[f"vllm:request_prefill_time_seconds_count{labels}"] == 2
    computed = 2 * usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert lines[f"vllm:request_prefill_kv_computed_tokens_sum{labels}"] == computed
    settings = (
        'block_size="16",enable_prefix_caching="True",engine="0",kv_cache_size_tokens="131072",num_gpu_blocks="8192"'
    )
    assert lines[f"vllm:cache_config_info{{{settings}}}"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(start_replica: StartReplica, stream: bool) -> None:
    replica = await start_replica(speed=1)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{replica.port}") as leaving, asyncio.TaskGroup() as tasks:
        request = tasks.create_task(_read(leaving, {**_LONG, "stream": stream}))
        await replica.until(lambda state: state["running"] == 1 and state["blocks_used"] > 0)
        request.cancel()
    state = await replica.until(lambda state: state["aborted"] == 1)
    assert (state["running"], state["blocks_used"]) == (0, 0)
    lines = await metric_lines(replica)
    assert lines['vllm:request_success_total{engine="0",finished_reason="abort",model_name="sim"}'] == 1


async def test_recent_requests_tell_what_a_gateway_set(replica: RunningReplica) -> None:
    headers = {"X-Session-ID": "from-header", "X-data-parallel-rank": "0"}
    by_body = {**_LONG, "max_tokens": 1, "session_id": "from-body", "vllm_xargs": {"session_id": "from-xargs"}}
    await replica.post("/v1/chat/completions", by_body, **headers)
    await replica.post("/v1/chat/completions", {**_LONG, "max_tokens": 1}, **headers)
    first, second = (await replica.state())["recent"]
    assert (first["session_id"], second["session_id"]) == ("from-body", "from-header")
    assert first["body_keys"] == ["model", "messages", "max_tokens", "session_id", "vllm_xargs"]
    assert second["headers"] == {"X-data-parallel-rank": "0", "X-Session-ID": "from-header"}
    assert first["prompt_tokens"] == second["prompt_tokens"] > 0


async def test_each_data_parallel_rank_has_a_cache_of_its_own(start_replica: StartReplica) -> None:
    replica = await start_replica(data_parallel=2)
    body = {**_LONG, "messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 1}

    async def cached_tokens(rank: str) -> int:
        status, answer = await replica.post("/v1/chat/completions", body, **{"X-data-parallel-rank": rank})
        return cached_tokens_of(answer) if status == 200 else -status

    assert [await cached_tokens(rank) for rank in ("0", "1")] == [0, 0]
    assert await cached_tokens("1") > 0
    assert await cached_tokens("2") == -400
    assert any('engine="1"' in line for line in await metric_lines(replica))


async def test_the_front_end_in_rust_tells_its_ranks_but_neither_start_time_nor_size(
    start_replica: StartReplica,
) -> None:
    replica = await start_replica(data_parallel=2, data_parallel_start_rank=2, rust_frontend=True)
    async with replica.http.get("/metrics") as response:
        facts = parse_metrics(await response.text(), 3)
    assert facts == EngineFacts(ranks=(2, 3), is_rust=True, figures=facts.figures)


def _serve(settings: SimSettings, ready: Connection) -> None:
    run(settings, ready.send)


@pytest.fixture
def process() -> Iterator[tuple[multiprocessing.process.BaseProcess, int]]:
    """A replica in its own process, ten times as fast as real time, and its port."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_serve, args=(SimSettings(speed=10), its))
    process.start()
    try:
        assert mine.poll(30)
        yield process, mine.recv()
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()
        its.close()


async def test_sigterm_lets_a_running_request_finish_and_a_crash_does_not(
    process: tuple[multiprocessing.process.BaseProcess, int],
) -> None:
    server, port = process
    assert server.pid is not None
    body = {**_LONG, "max_tokens": 100, "stream": True}  # 0.2 s
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        await response.content.readline()
        os.kill(server.pid, signal.SIGTERM)
        assert b"[DONE]" in await response.read()
    await asyncio.to_thread(server.join, 5)
    assert server.exitcode == 0


async def test_a_crash_ends_the_process_in_the_middle_of_a_stream(
    process: tuple[multiprocessing.process.BaseProcess, int],
) -> None:
    server, port = process
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        await (await http.post("/sim/fail", json={"mode": "crash", "after_tokens": 3})).read()
        async with http.post("/v1/chat/completions", json={**_LONG, "stream": True}) as response:
            assert (await until_broken(response)).count(b'"delta":{"content":"') == 3
    await asyncio.to_thread(server.join, 5)
    assert server.exitcode == 3


async def _read(http: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with http.post("/v1/chat/completions", json=body) as response:
        return await response.read()


async def test_an_answer_is_cut_off_where_the_model_ends(start_replica: StartReplica) -> None:
    replica = await start_replica(num_gpu_blocks=8)  # 128 tokens
    answer = await replica.chat("x" * 400, max_tokens=128)
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"
