"""coordinator/lmcache_chunks.py computes LMCache's names of chunks from a prompt's tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from bench.vllm import install
from coordinator.lmcache_chunks import ChunkTier, ImageSpan, with_images
from tests.lmcache.conftest import Stage
from tests.lmcache.stage import CHUNK_TOKENS, PREFIX
from tests.vllm.workload import picture_part, text

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(600)]

PLACEHOLDER = 3
"""The token of the model's images. No text contains it."""
IDENTIFIERS = ("the first picture", "another picture")


def messages(images: bool) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for name in IDENTIFIERS if images else ():
        parts += [{"type": "text", "text": f"This is {name}: "}, picture_part(name, (320, 320), uuid=name)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text(f"named, images {images}", 5000)}]}]


def keys_of(stage: Stage, body: dict[str, Any]) -> set[bytes]:
    """The keys predicted for the prompt. The body of /tokenize is the request's body."""
    answer = stage.first.http.post(f"{stage.first.engine.url}/tokenize", json=body).raise_for_status().json()
    tokens, spans, at = answer["tokens"], [], 0
    for token, run in groupby(tokens):
        length = len(list(run))
        if token == PLACEHOLDER:
            spans.append(ImageSpan(IDENTIFIERS[len(spans)], at, length))
        at += length
    tier = ChunkTier(PREFIX, str(install.model(install.TINY)), CHUNK_TOKENS)
    hashes = tier.hashes(with_images(tokens, spans))
    assert len(hashes) >= 2
    return {tier.name(each, body.get("cache_salt", "")).encode() for each in hashes}


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("salt", ["", "7f6e5d"], ids=["unsalted", "salted"])
def test_the_keys_in_redis_are_those_that_the_tokens_foretell(stage: Stage, images: bool, salt: str) -> None:
    body: dict[str, Any] = {"model": install.MODEL, "messages": messages(images), "max_tokens": 4}
    if salt:
        body["cache_salt"] = salt
    before, foretold = stage.chunks.keys(), keys_of(stage, body)
    stage.first.http.post(f"{stage.first.engine.url}/v1/chat/completions", json=body).raise_for_status()
    assert stage.chunks.new_since(before, len(foretold)) == foretold
