"""Recorded traffic: its form, its bound, its prompts, and a small replay through real gateways."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.load import BLOCK_TOKENS, MODEL
from bench.replay.__main__ import main
from bench.replay.fleet import prefill_load, setup
from bench.replay.measure import busiest, variation
from bench.replay.prompts import content, findable_tokens, sent_tokens, session
from bench.replay.trace import BadTrace, Trace, TraceRequest, read_trace
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


def test_a_compressed_recording_and_one_out_of_order_read_the_same(tmp_path: Path) -> None:
    plain = read_trace(written(tmp_path, ROWS))
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(json.dumps(each) for each in reversed(ROWS)).encode()))
    assert read_trace(packed) == plain


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"\n", "it has no requests"),
        ("cut.jsonl.gz", gzip.compress(b"{}" * 1000, mtime=0)[:-12], "cut.jsonl.gz: "),
        ("plain.jsonl.gz", b"{}", "plain.jsonl.gz: Not a gzipped file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadTrace) as refused:
        read_trace(tmp_path / name)
    assert message in str(refused.value)


def test_a_part_of_a_recording_has_its_own_bound(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, ROWS))
    assert trace.first(2).repeated_tokens == 1024
    part = trace.window(1, 3)
    assert [request.at_ms for request in part.requests] == [1000, 2500]
    assert part.repeated_tokens == 1024
    with pytest.raises(BadTrace, match="no request came from 9 to 10 s; the last one came at 4 s"):
        trace.window(9, 10)


def test_scaling_changes_all_lengths_alike(tmp_path: Path) -> None:
    rows = [*ROWS, row(5000, 513, 8, 9, output_length=1000)]
    trace = read_trace(written(tmp_path, rows))
    scaled = trace.scaled(64)
    assert [request.input_tokens for request in scaled.requests] == [162, 138, 162, 64, 88, 65]
    assert [request.output_tokens for request in scaled.requests] == [1, 1, 1, 1, 1, 125]
    assert scaled.repeated_tokens / scaled.input_tokens == pytest.approx(
        trace.repeated_tokens / trace.input_tokens, rel=0.01
    )
    assert trace.scaled(512) == trace


def engine_prompt(request: TraceRequest, block_tokens: int) -> EnginePrompt:
    messages = session(request, block_tokens, 0).turns[0]
    return chat_prompt(SimReplica(SimSettings(events=False)), {"model": MODEL, "messages": list(messages)}, None)


def hashes(prompt: EnginePrompt) -> list[int]:
    hasher = BlockHasher(prompt, BLOCK_TOKENS)
    hasher.extend(prompt.tokens)
    return hasher.hashes


@pytest.mark.parametrize("block_tokens", [16, 64, 512])
def test_prompts_share_a_prefix_as_far_as_their_ids_agree_and_have_the_right_length(
    block_tokens: int, tmp_path: Path
) -> None:
    trace = read_trace(written(tmp_path, ROWS)).scaled(block_tokens)
    prompts = [engine_prompt(request, block_tokens) for request in trace.requests]
    assert [prompt.num_tokens for prompt in prompts] == [sent_tokens(request) for request in trace.requests]
    first, second, again, other, _ = map(hashes, prompts)
    shared = 2 * block_tokens // BLOCK_TOKENS
    assert first[:shared] == second[:shared]
    assert first[shared] != second[shared]
    assert first == again
    assert first[0] != other[0]


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


def test_a_block_has_the_same_text_in_every_prompt() -> None:
    trace = Trace((TraceRequest(0, 130, 1, (7, 8, 9)), TraceRequest(0, 128, 1, (7, 8))), 64)
    long, short = (content(request, 64) for request in trace.requests)
    assert long.startswith(short)
    assert len(long) == 130 * 4


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


def test_the_rate_keeps_the_engines_as_busy_as_asked_and_time_fits_the_machine(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, conversations(groups=6, turns=6))).scaled(64)
    for replicas in (2, 20):
        fleet = setup(trace, replicas, held=1, tokens_scale=1 / 8, busy=0.5, rate=None, per_s=10)
        assert prefill_load(trace, replicas, 1 / 8)[0] * fleet.rate == pytest.approx(0.5)
        sent_within_s = trace.span_s / fleet.rate / fleet.speed
        assert len(trace.requests) / sent_within_s == pytest.approx(10)
    assert setup(trace, 2, 1, 1 / 8, busy=0.5, rate=3, per_s=10).rate == 3


def test_balance_is_told_by_the_busiest_and_by_the_variation() -> None:
    assert (busiest([1, 2, 3]), variation([1, 2, 3])) == (1.5, 0.4082)
    assert (busiest([0, 0]), variation([0, 0])) == (0.0, 0.0)
