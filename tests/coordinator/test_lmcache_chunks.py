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

from coordinator.lmcache_chunks import ChunkTier, ImageSpan, with_images

CAPTURED = json.loads((Path(__file__).parents[1] / "captures" / "lmcache-chunks.json").read_text("utf-8"))


@pytest.mark.parametrize("prompt", CAPTURED, ids=lambda prompt: f"{len(prompt['images'])} images")
def test_the_names_are_those_that_lmcache_gave(prompt: dict[str, Any]) -> None:
    tier = ChunkTier("kvchunk", "model", prompt["chunk_tokens"])
    tokens = with_images(prompt["tokens"], [ImageSpan(*span) for span in prompt["images"]])
    hashes = tier.hashes(tokens)
    assert len(hashes) == len(prompt["tokens"]) // prompt["chunk_tokens"]
    found = [tier.name(each, prompt["cache_salt"]) for each in hashes]
    assert sorted(found) == [f"kvchunk@model@{key}" for key in prompt["keys"]]


def test_only_full_chunks_have_names_and_a_later_one_follows_the_one_before() -> None:
    tier = ChunkTier("", "m", 4)
    first, second = tier.hashes(range(11))
    assert tier.hashes(range(7)) == [first]
    assert tier.hashes(range(4, 8), first) == [second]


def test_a_key_names_prefix_model_rank_group_hash_and_salt() -> None:
    digest = blake3(b"a chunk").digest()
    tier = ChunkTier("kvchunk", "Qwen/Qwen2.5-7B-Instruct", 64, 2)
    assert tier.name(digest) == f"kvchunk@Qwen/Qwen2.5-7B-Instruct@02000200@0@{digest.hex()}"
    assert tier.name(digest, "a-tenant").endswith(f"@{digest.hex()}@a-tenant")
    assert ChunkTier("", "m", 64).name(digest) == f"m@01000100@0@{digest.hex()}"


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
        ChunkTier(*arguments)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        ChunkTier("p", "m", 4).hashes([token])
