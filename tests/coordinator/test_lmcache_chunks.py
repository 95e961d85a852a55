"""The chunk names are checked against names from LMCache 0.5.6. The file tests/captures/lmcache-chunks.json has two
prompts of a real vLLM: their tokens, the positions of their image placeholders, and the keys that were in Redis
afterwards, without the prefix and the model's folder. tests/lmcache/test_chunk_names.py checks the names against
LMCache itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from coordinator.lmcache_chunks import START, ChunkNames, ImageSpan, with_images

CAPTURED = json.loads((Path(__file__).parents[1] / "captures" / "lmcache-chunks.json").read_text("utf-8"))


@pytest.mark.parametrize("prompt", CAPTURED, ids=lambda prompt: f"{len(prompt['images'])} images")
def test_the_names_are_those_that_lmcache_gave(prompt: dict[str, Any]) -> None:
    names = ChunkNames("kvchunk", "model", prompt["chunk_tokens"])
    tokens = with_images(prompt["tokens"], [ImageSpan(*span) for span in prompt["images"]])
    _, hashes = names.advance(START, tokens)
    assert len(hashes) == len(prompt["tokens"]) // prompt["chunk_tokens"]
    found = [key for each in hashes for key in names.keys(each, prompt["cache_salt"])]
    assert sorted(found) == [f"kvchunk@model@{key}" for key in prompt["keys"]]


def test_only_full_chunks_have_names() -> None:
    state, hashes = ChunkNames("", "m", 4).advance(START, range(7))
    assert len(hashes) == 1
    assert state == (hashes[0], b"".join(token.to_bytes(4, "big") for token in (4, 5, 6)))


def test_a_key_names_prefix_model_rank_group_hash_and_salt() -> None:
    digest = blake3(b"a chunk").digest()
    names = ChunkNames("kvchunk", "Qwen/Qwen2.5-7B-Instruct", 64, ("02000200", "02010201"), "1")
    assert names.keys(digest) == (
        f"kvchunk@Qwen/Qwen2.5-7B-Instruct@02000200@1@{digest.hex()}",
        f"kvchunk@Qwen/Qwen2.5-7B-Instruct@02010201@1@{digest.hex()}",
    )
    assert names.keys(digest, "a-tenant")[0].endswith(f"@{digest.hex()}@a-tenant")
    assert ChunkNames("", "m", 64).keys(digest) == (f"m@01000100@0@{digest.hex()}",)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_of_an_image_that_began_before_these_tokens_the_rest_is_replaced(before: int, length: int, cut: int) -> None:
    tokens = [7] * 80
    whole = with_images(tokens, [ImageSpan("a picture", before, length)])
    assert with_images(tokens[cut:], [ImageSpan("a picture", before - cut, length)]) == whole[cut:]
    assert whole[:before].tolist() == tokens[:before]
    assert whole[before + length :].tolist() == tokens[before + length :]


def test_two_images_have_no_values_in_common() -> None:
    tokens = [7] * 40
    one, other = (with_images(tokens, [ImageSpan(name, 0, 40)]) for name in ("a picture", "another picture"))
    assert not set(one) & set(other)
    assert max(*one, *other) < 2**31


@pytest.mark.parametrize("arguments", [("p", "a@model", 64), ("a@prefix", "m", 64), ("p", "m", 0)])
def test_what_lmcache_could_not_name_is_refused(arguments: tuple[str, str, int]) -> None:
    with pytest.raises(ValueError):
        ChunkNames(*arguments)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        ChunkNames("p", "m", 4).advance(START, [token])
