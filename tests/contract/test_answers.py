"""The simulated replica refuses the same requests as a real vLLM 0.32. Its answers have the same shape.

`vllm-refusals.jsonl` has requests with odd values, and vLLM's status for each.
`vllm-answers.jsonl` has whole answers and the events of streams.
`vllm-ranks.jsonl` has data-parallel servers of vLLM 0.33, with status and message for each X-data-parallel-rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.simulator.conftest import RunningReplica, StartReplica

_CAPTURES = Path(__file__).parent.parent / "captures"
_NOT_SIMULATED = {"usage", "system_fingerprint"}
_BY_TOKEN = {"top_logprobs"}
"""Fields of completions whose objects have tokens as keys."""


def captured(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_CAPTURES / name).read_text("utf-8").splitlines()]


@pytest.fixture
async def replica(start_replica: StartReplica) -> RunningReplica:
    return await start_replica(num_gpu_blocks=256)  # 4096 tokens, as in the captured vLLM


async def test_odd_values_are_refused_and_taken_as_by_vllm(replica: RunningReplica) -> None:
    captures = captured("vllm-refusals.jsonl")
    assert len(captures) > 150
    for capture in captures:
        body = {"model": "sim", **capture["body"]}
        async with replica.http.post(capture["path"], json=body) as response:
            told = await response.read()
        assert response.status == capture["status"], capture["body"]
        if response.status != 200:
            assert json.loads(told)["error"].keys() <= capture["error"]["error"].keys()


async def test_a_rank_that_is_asked_for_is_taken_or_refused_as_by_both_front_ends(start_replica: StartReplica) -> None:
    for capture in captured("vllm-ranks.jsonl"):
        ranks, is_rust = capture["ranks"], capture["front_end"] == "rust"
        replica = await start_replica(
            data_parallel=len(ranks), data_parallel_start_rank=ranks[0], rust_frontend=is_rust
        )
        for rank, expected in capture["header"].items():
            body = {"model": "sim", "prompt": "hello", "max_tokens": 1}
            status, answer = await replica.post("/v1/completions", body, **{"X-data-parallel-rank": rank})
            said = {"status": status} | ({} if status == 200 else {"message": answer["error"]["message"]})
            assert said == {key: value for key, value in expected.items() if key != "rank"}, (capture["mode"], rank)


async def test_answers_have_the_fields_of_vllms(replica: RunningReplica) -> None:
    for capture in captured("vllm-answers.jsonl"):
        path, body = capture["path"], {"model": "sim", **capture["body"]}
        if body.get("stream"):
            answer: Any = await replica.chunks(path, body)
        else:
            _, answer = await replica.post(path, body)
        assert fields_of(answer) == fields_of(capture["answer"]), capture["body"]


def fields_of(value: Any, name: str = "") -> Any:
    """Names and types at all depths. A list becomes the set of its items' shapes."""
    if isinstance(value, list):
        return frozenset(fields_of(inner, name) for inner in value)
    if not isinstance(value, dict):
        return type(value).__name__
    if name in _BY_TOKEN and "token" not in value and "logprob" not in value:
        return frozenset(fields_of(inner, name) for inner in value.values())
    return tuple(sorted((key, fields_of(inner, key)) for key, inner in value.items() if key not in _NOT_SIMULATED))
