"""Chunk sizes and timeouts are valid for any model and any prompt length; otherwise they are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ops.replica.sharing import (
    LARGEST_CHUNK_BYTES,
    SMALLEST_CHUNK_BYTES,
    Pace,
    check_chunk,
    chunk_tokens,
    pace,
)
from gateway.settings.config_file import SettingsError

TOKEN_BYTES = st.integers(min_value=256, max_value=2**20)
BLOCK_TOKENS = st.sampled_from([1, 8, 16, 32, 48, 64, 128])


@pytest.mark.parametrize(
    ("token_bytes", "block", "tokens"),
    [
        (57_344, 16, 64),  # Qwen2.5-7B: 3.5 MiB
        (131_072, 16, 32),  # Llama-3-8B: exactly 4 MiB
        (40_960, 16, 96),  # Llama-3-70B on 8 GPUs
        (12_288, 16, 256),  # Qwen2.5-0.5B: 3 MiB; more tokens would fit, but chunks would be shared less
        (2_048, 32, 512),  # the tests' model: 256 tokens are only half a MiB
        (262_144, 16, 16),  # a block of 4 MiB is one chunk
    ],
)
def test_the_chunk_of_a_known_model(token_bytes: int, block: int, tokens: int) -> None:
    assert chunk_tokens(token_bytes, block) == tokens


@given(TOKEN_BYTES, BLOCK_TOKENS)
def test_a_chunk_is_whole_blocks_of_1_to_4_mib_or_refused_for_its_block(token_bytes: int, block: int) -> None:
    try:
        tokens = chunk_tokens(token_bytes, block)
    except SettingsError:
        assert token_bytes * block > LARGEST_CHUNK_BYTES
        return
    assert tokens % block == 0
    assert SMALLEST_CHUNK_BYTES <= tokens * token_bytes <= LARGEST_CHUNK_BYTES
    check_chunk(tokens, token_bytes, block)


@given(st.integers(1, 5000), st.floats(0.2, 60))
def test_a_redis_that_never_answers_holds_a_prompt_up_no_longer_than_allowed(chunks: int, max_stall_s: float) -> None:
    try:
        found = pace(chunks, max_stall_s)
    except SettingsError:
        return
    # The prompt's own lookups wait for the same number of stores of the previous request.
    assert 2 * math.ceil(chunks / found.num_workers) * found.request_timeout_s <= max_stall_s + 1e-9
    assert 0.05 <= found.request_timeout_s <= 0.3


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (1, Pace(8, 0.3)),
        (24, Pace(8, 0.3)),
        (80, Pace(8, 0.1)),
        (81, Pace(16, 0.166)),
        (512, Pace(64, 0.125)),
        (1280, Pace(128, 0.1)),
        (2560, Pace(128, 0.05)),
    ],
)
def test_no_more_workers_than_a_comfortable_timeout_needs(chunks: int, expected: Pace) -> None:
    assert pace(chunks, 2.0) == expected


def test_a_prompt_of_too_many_chunks_is_refused_with_the_stall_that_it_would_mean() -> None:
    with pytest.raises(SettingsError, match=r"hold it up for 3\.2 s: raise max_stall_s"):
        pace(4096, 2.0)
    assert pace(4096, 3.2) == Pace(128, 0.05)
