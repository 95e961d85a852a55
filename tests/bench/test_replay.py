"""Recorded traffic: its form, its bound, its prompts, and a small replay through real gateways."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.load import BLOCK_TOKENS, MODEL, Result
from bench.replay.__main__ import main
from bench.replay.fleet import Setup
from bench.replay.measure import good
from bench.replay.prompts import findable_tokens, sent_tokens, session
from bench.replay.trace import BadTrace, TraceRequest, read_trace
from bench.routing.systems import OURS
from gateway.simulator.openai_api import chat_prompt
from gateway.simulator.prompt import BlockHasher, EnginePrompt
from gateway.simulator.replica import SimReplica
from gateway.simulator.settings import SimSettings


def row(at_ms: float, input_length: int, *hash_ids: int, output_length: int = 4) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}


def written(folder: Path, rows: Sequence[object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return path


ROWS = [
    row(0, 1300, 1, 2, 3),
    row(1000, 1100, 1, 2, 4),
    row(2500, 1300, 1, 2, 3),
    row(3000, 512, 5),
    row(4000, 700, 5, 6),
]
"""Tokens whose ids came before: 0, 1024, 1300, 0 and 512."""


def test_a_recording_says_what_an_endless_cache_would_find(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, ROWS))
    assert (trace.span_s, trace.distinct_blocks, trace.input_tokens) == (4.0, 6, 4912)
    assert trace.repeated_tokens == 1024 + 1300 + 512
    assert trace.requests[1] == TraceRequest(1000.0, 1100, 4, (1, 2, 4))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: a JSON object is needed, not [1]"),
        ({"input_length": 1}, "line 2: timestamp: it is missing"),
        (row(-1, 512, 1), "line 2: timestamp: milliseconds from 0 are needed, not -1"),
        (row(0, 0, 1), "line 2: input_length: a whole number from 1 is needed, not 0"),
        (row(0, 512, 1) | {"output_length": 1.5}, "line 2: output_length: a whole number from 1 is needed, not 1.5"),
        (row(0, 512, 1) | {"hash_ids": "1"}, 'line 2: hash_ids: a list is needed, not "1"'),
        (row(0, 1000, 1, True), "line 2: hash_ids[1]: a whole number is needed, not true"),
        (row(0, 1000, 1), "line 2: hash_ids: 1 ids, but an input_length of 1000 has 2 blocks of 512 tokens"),
        (row(0, 1000, 9, 2), "line 2: hash_ids[1]: 2 follows 9 here, and follows 1 in line 1; an id must stand for"),
        (row(0, 1500, 1, 2, 3), "line 2: hash_ids[2]: 3 stands for 476 tokens here, and for 276 in line 1"),
    ],
)
def test_a_line_of_another_form_is_named_with_its_field(line: object, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, ROWS[:1])
    path.write_text(path.read_text() + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(BadTrace) as refused:
        read_trace(path)
    assert message in str(refused.value)


def engine_prompt(request: TraceRequest, block_tokens: int) -> EnginePrompt:
    messages = session(request, block_tokens, 0).turns[0]
    return chat_prompt(SimReplica(SimSettings(events=False)), {"model": MODEL, "messages": list(messages)}, None)


def hashes(prompt: EnginePrompt) -> list[int]:
    hasher = BlockHasher(prompt, BLOCK_TOKENS)
    hasher.extend(prompt.tokens)
    return hasher.hashes


@pytest.mark.parametrize("block_tokens", [16, 64, 512])
def test_the_bound_is_what_one_engine_with_an_endless_cache_finds(block_tokens: int, tmp_path: Path) -> None:
    rows = [*ROWS, row(5000, 512, 5), row(6000, 1024, 1, 2), row(7000, 1024, 1, 2)]
    trace = read_trace(written(tmp_path, rows)).scaled(block_tokens)
    cached: set[int] = set()
    found = 0
    for request in trace.requests:
        prompt = engine_prompt(request, block_tokens)
        reusable = hashes(prompt)[: (prompt.num_tokens - 1) // BLOCK_TOKENS]
        found += sum(each in cached for each in reusable) * BLOCK_TOKENS
        cached.update(hashes(prompt))
    assert findable_tokens(trace) == found


def conversations(groups: int, turns: int) -> list[dict[str, Any]]:
    """Conversations whose prompts grow by two blocks a turn, under one system prompt of a block."""
    return [
        row(
            1000 * (turn * groups + group),
            512 + 1024 * (turn + 1),
            0,
            *(1000 * (group + 1) + block for block in range(2 * (turn + 1))),
            output_length=16,
        )
        for turn in range(turns)
        for group in range(groups)
    ]


def test_a_small_recording_goes_through_real_gateways_and_finds_most_of_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = written(tmp_path, conversations(groups=7, turns=5)), tmp_path / "out.json"
    options = ["--systems", OURS, "--replicas", "3", "--caches", "6,0.01", "--busy", "0.1", "--per-s", "25"]
    monkeypatch.setattr(sys, "argv", ["bench.replay", str(trace), *options, "--out", str(out)])
    monkeypatch.setattr("bench.record.begin", lambda: None)  # it installs signal handlers for a benchmark
    main()
    written_down = json.loads(out.read_text())
    (found,) = written_down["rows"]
    sent = read_trace(trace).scaled(64)
    assert (found["requests"], found["failed"]) == (35, 0)
    assert found["prompt_tokens"] == sum(map(sent_tokens, sent.requests))
    assert found["findable_tokens"] == findable_tokens(sent)
    assert 0.8 < found["of_bound"] <= 1  # taking turns finds less than half of it
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p99_ms"]
    assert "the longest request has" in written_down["left_out"][0]
    assert "64 here for 512 of the recording" in written_down["scaling"][1]
    assert "3 replicas that hold 6 of the distinct blocks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_replicas_with_roles_answer_a_small_recording_and_find_most_of_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = written(tmp_path, conversations(groups=3, turns=4)), tmp_path / "out.json"
    options = ["--prefills", "1", "--replicas", "3", "--caches", "6", "--busy", "0.1", "--per-s", "10"]
    monkeypatch.setattr(sys, "argv", ["bench.replay", str(trace), *options, "--out", str(out)])
    monkeypatch.setattr("bench.record.begin", lambda: None)
    main()
    together, apart = json.loads(out.read_text())["rows"]
    assert (together["prefills"], apart["prefills"]) == (0, 1)
    for found in (together, apart):
        assert (found["requests"], found["failed"]) == (12, 0)
        assert 0.6 < found["of_bound"] <= 1


def test_a_goal_is_met_in_the_time_of_the_recording_and_not_by_failed_requests() -> None:
    setup = Setup(replicas=8, held=1, tokens_scale=0.25, rate=1, speed=2, prefills=4)
    result = Result(requests=3, failed=1, ttft_s=[2.4, 2.6, 10.1])
    assert good(result, [40.0, 40.0, 40.0], setup) == (0.25, 0.5)
    assert good(result, [40.0, 60.0, 40.0], setup) == (0.25, 0.25)
