"""LMCache's names for the chunks that an engine's blocks fill, found from its events."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from coordinator.agent.blocks import BlockTable
from coordinator.agent.chunk_index import Chunk, ChunkIndex
from coordinator.agent.kv_events import Removed, Stored
from coordinator.agent.residency import Resident
from coordinator.lmcache_chunks import ChunkTier
from tests.coordinator.agent.prompts import SIZE, stored
from tests.coordinator.test_lmcache_chunks import CAPTURED

TIER = ChunkTier(prefix="kv", model="m", chunk_tokens=2 * SIZE, world_size=1, ttl_s=60)


class Engine:
    """An engine that stores blocks of SIZE tokens, and its chunk index."""

    def __init__(self, tier: ChunkTier = TIER) -> None:
        self.table = BlockTable()
        self.book = ChunkIndex(tier, self.table)

    def store(self, *events: Stored) -> None:
        for event in events:
            self.table.store(event)
            self.book.store(event)

    def chunk(self, block_hash: int, tokens: int, span_tokens: int | None = None) -> Chunk | None:
        """The chunk of a key that ends after `tokens` tokens, in the block `block_hash`."""
        span = tokens if span_tokens is None else span_tokens
        return self.book.chunk_of(Resident("key", tokens, span, "gpu", block_hash))


def prompt(blocks: int, first_token: int = 0) -> list[int]:
    return [first_token + token for token in range(SIZE * blocks)]


def names(tokens: list[int], salt: str = "") -> list[str]:
    return [TIER.name(each, salt) for each in TIER.hashes(tokens)]


def captured_events(captured: dict[str, Any], size: int) -> list[Stored]:
    """vLLM's events for a captured prompt, one event per block."""
    count = len(captured["tokens"]) // size
    events, parent = [], None
    for at in range(count):
        beside: list[Any] = [
            [name, start - at * size]
            for name, start, length in captured["images"]
            if start < (at + 1) * size and start + length > at * size
        ]
        if at == 0 and captured["cache_salt"]:
            beside.append(captured["cache_salt"])
        tokens = captured["tokens"][at * size : (at + 1) * size]
        events.append(stored([at + 1], parent, tokens=tokens, block_size=size, extra=[beside or None]))
        parent = at + 1
    return events


@pytest.mark.parametrize("captured", CAPTURED, ids=lambda captured: f"{len(captured['images'])} images")
def test_a_prompts_chunks_are_called_what_lmcache_called_them(captured: dict[str, Any]) -> None:
    width, size = captured["chunk_tokens"], 32
    engine = Engine(ChunkTier("kvchunk", "model", width, 1, 60))
    engine.store(*captured_events(captured, size))
    found = [engine.chunk(end // size, end, width) for end in range(width, len(captured["tokens"]) + 1, width)]
    assert [chunk.tokens for chunk in found if chunk] == [width * (i + 1) for i in range(len(captured["keys"]))]
    assert sorted(chunk.name for chunk in found if chunk) == sorted(f"kvchunk@model@{key}" for key in captured["keys"])


def test_a_key_has_the_last_chunk_that_ends_before_it() -> None:
    engine, tokens = Engine(), prompt(5)
    engine.store(stored([1, 2, 3, 4, 5], tokens=tokens))
    first, second = names(tokens)
    assert engine.chunk(1, SIZE) is None
    assert [engine.chunk(block, SIZE * block) for block in (2, 3)] == [Chunk(8, first)] * 2
    assert [engine.chunk(block, SIZE * block + 1) for block in (4, 5)] == [Chunk(16, second)] * 2


def test_a_key_that_adds_no_chunk_to_the_key_before_it_has_none() -> None:
    engine = Engine()
    engine.store(stored([1, 2, 3, 4], tokens=prompt(4)))
    assert engine.chunk(3, 3 * SIZE, span_tokens=SIZE) is None
    assert engine.chunk(4, 4 * SIZE, span_tokens=SIZE) is not None


def test_prompts_that_go_on_differently_share_chunks_up_to_there() -> None:
    engine = Engine()
    engine.store(stored([1, 2], tokens=prompt(2)), stored([3, 4], 2, tokens=prompt(2, 50)))
    engine.store(stored([5, 6], 2, tokens=prompt(2, 70)))
    found = {end: engine.chunk(end, 16) for end in (4, 6)}
    assert found[4] == Chunk(16, names(prompt(2) + prompt(2, 50))[1])
    assert found[6] == Chunk(16, names(prompt(2) + prompt(2, 70))[1])
    assert found[4] != found[6]


@pytest.mark.parametrize(
    "change",
    [{"medium": "cpu"}, {"lora": "adapter"}, {"tokens": []}, {"is_prefix": False}],
    ids=["on another medium", "of a LoRA adapter", "without tokens", "of another group"],
)
def test_blocks_that_do_not_tell_a_prompt_have_no_chunks(change: dict[str, Any]) -> None:
    engine = Engine()
    engine.store(stored([1, 2], **{"tokens": prompt(2), **change}))
    assert engine.chunk(2, 8) is None


def test_where_the_beginning_was_never_told_no_chunk_has_a_name() -> None:
    engine = Engine()
    engine.store(stored([3, 4], 2, tokens=prompt(2)))
    assert engine.chunk(4, 16) is None
    engine.store(stored([1, 2], tokens=prompt(2, 50)))
    assert engine.chunk(4, 16) == Chunk(16, names(prompt(2, 50) + prompt(2))[1])


def test_chunks_that_are_not_whole_blocks_have_no_names() -> None:
    engine = Engine(replace(TIER, chunk_tokens=2 * SIZE + 1))
    engine.store(stored([1, 2, 3, 4], tokens=prompt(4)))
    assert engine.chunk(4, 16) is None


def test_of_several_ranks_the_first_ones_chunks_are_named() -> None:
    engine = Engine(replace(TIER, world_size=4))
    engine.store(stored([1, 2], tokens=prompt(2)))
    chunk = engine.chunk(2, 8)
    assert chunk is not None
    assert chunk.name.split("@")[2] == "04000400"


def test_the_book_of_an_engine_that_evicts_stays_as_small_as_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.agent.chunk_index._SLACK_BLOCKS", 2)
    engine = Engine()
    blocks = range(1, 1000)
    engine.store(stored([1], tokens=prompt(1)))
    for before, block in pairwise(blocks):
        engine.store(stored([block], before, tokens=prompt(1, block)))
        engine.table.remove(Removed([before], "gpu", 0))
    assert len(engine.book) <= 4
