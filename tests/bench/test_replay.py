"""Recorded traffic: its form, its bound, its prompts, and a small replay through real gateways."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.load import BLOCK_TOKENS, MODEL
from bench.replay.prompts import content, findable_tokens, sent_tokens, session
from bench.replay.trace import BadTrace, Trace, TraceRequest, read_trace
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
        ("cut.jsonl.gz", gzip.compress(b"{}" * 1000)[:-12], "cut.jsonl.gz: "),
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
