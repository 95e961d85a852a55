"""Finds LMCache's names of the chunks that an engine's blocks fill. Pure.

A chunk's name follows from its tokens and the chunk before it (see coordinator/lmcache_chunks.py). KV events tell the
tokens and the parent of each block. So the block in which a key ends leads back to all chunks of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.agent.blocks import BlockTable
from coordinator.agent.kv_events import Stored
from coordinator.agent.residency import Resident
from coordinator.lmcache_chunks import START, ChunkTier, ImageSpan, with_images

_SLACK_BLOCKS = 4096
"""The index may have twice as many blocks as the engine holds, plus this number."""


class Chunk(NamedTuple):
    """The last full chunk up to a place in a prompt. `tokens` is its end."""

    tokens: int
    name: str


class _Block(NamedTuple):
    parent: int | None
    tokens: bytes
    """As LMCache hashes them."""
    salt: str
    """The request's cache_salt, which is part of its chunks' names; only in a first block."""


class _ChunkEnd(NamedTuple):
    """The chunk that ends with a block."""

    hash: bytes
    salt: str


class ChunkIndex:
    """The blocks of one engine, by hash."""

    def __init__(self, tier: ChunkTier, table: BlockTable) -> None:
        self._tier = tier
        self._table = table
        self._blocks: dict[int, _Block] = {}
        self._ends: dict[int, _ChunkEnd] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, event: Stored) -> None:
        """Add blocks that the table has just added. Blocks of LoRA adapters are left out: LMCache's names do not
        distinguish adapters."""
        size = self._table.block_size
        if event.medium != "gpu" or not event.is_prefix or event.lora or event.block_size != size or not event.tokens:
            return
        parent = event.parent
        for index, block_hash in enumerate(event.hashes):
            if block_hash not in self._blocks:
                spans = self._table.media_spans([block_hash])
                images = [ImageSpan(each.identifier, each.start, each.end - each.start) for each in spans]
                tokens = with_images(event.tokens[index * size : (index + 1) * size], images)
                salt = _salt(event.extra, index) if parent is None else ""
                self._blocks[block_hash] = _Block(parent, tokens.tobytes(), salt)
            parent = block_hash
        if len(self._blocks) > 2 * len(self._table) + _SLACK_BLOCKS:
            self._blocks = {each: block for each, block in self._blocks.items() if each in self._table}
            self._ends = {each: end for each, end in self._ends.items() if each in self._table}

    def chunk_of(self, resident: Resident) -> Chunk | None:
        """The last chunk that ends at or before a resident key, and after the key before it; None if there is none, or
        its name is not known."""
        size, width = self._table.block_size, self._tier.chunk_tokens
        if not size or width % size:
            return None
        blocks = resident.tokens // size
        chunks = blocks * size // width
        if chunks == 0 or chunks == (resident.tokens - resident.span_tokens) // size * size // width:
            return None
        block_hash: int | None = resident.block_hash
        for _ in range(blocks - chunks * (width // size)):
            block_hash = self._parent(block_hash)
        end = self._end(block_hash)
        if end is None:
            return None
        return Chunk(chunks * width, self._tier.name(end.hash, end.salt))

    def _parent(self, block_hash: int | None) -> int | None:
        block = self._blocks.get(block_hash) if block_hash is not None else None
        return block.parent if block is not None else None

    def _end(self, block_hash: int | None) -> _ChunkEnd | None:
        """The chunk that ends with a block; None if a block before it is not known."""
        missing: list[tuple[int, list[_Block]]] = []
        end = None
        while block_hash is not None and (end := self._ends.get(block_hash)) is None:
            blocks, last = [], block_hash
            for _ in range(self._tier.chunk_tokens // self._table.block_size):
                block = self._blocks.get(block_hash) if block_hash is not None else None
                if block is None:
                    return None
                blocks.append(block)
                block_hash = block.parent
            missing.append((last, blocks))
        for last, blocks in reversed(missing):
            before, salt = (START, blocks[-1].salt) if end is None else end
            tokens = b"".join(block.tokens for block in reversed(blocks))
            [chunk_hash] = self._tier.hashes(memoryview(tokens).cast("I"), before)
            end = self._ends[last] = _ChunkEnd(chunk_hash, salt)
        return end


def _salt(extra: Sequence[Any] | None, index: int) -> str:
    """vLLM puts a request's salt, unchanged, beside the tokens of its first block."""
    beside = extra[index] if extra is not None and index < len(extra) else None
    return next((each for each in beside or () if isinstance(each, str)), "")
