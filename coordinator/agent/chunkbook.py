"""What LMCache calls the chunks that an engine's blocks fill. Pure.

A chunk's name is found from its tokens and the chunk before it (see coordinator/lmcache_chunks.py), and a block's
events tell its tokens and its parent: so each block that a key ends in leads back to the chunks before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.agent.blocks import BlockTable
from coordinator.agent.events import Stored
from coordinator.agent.residents import Resident
from coordinator.lmcache_chunks import START, ChunkState, ChunkTier, ImageSpan, with_images

_SLACK_BLOCKS = 4096
"""So many blocks that the engine has dropped are remembered beyond twice those that it has."""


class Chunk(NamedTuple):
    """Up to some place, `tokens` of a prompt fill whole chunks, of which the last is called `name`."""

    tokens: int
    name: str


class _Block(NamedTuple):
    parent: int | None
    tokens: bytes
    """As LMCache hashes them."""
    salt: str
    """Of a first block: the request's cache_salt, which is part of its chunks' names."""


class _Link(NamedTuple):
    """A block at which a chunk ends."""

    state: ChunkState
    salt: str


class ChunkBook:
    """The blocks of one engine, by hash."""

    def __init__(self, tier: ChunkTier, table: BlockTable) -> None:
        self._names = tier.names()
        self._table = table
        self._blocks: dict[int, _Block] = {}
        self._links: dict[int, _Link] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, event: Stored) -> None:
        """Blocks that the table has just taken in. Not a LoRA adapter's: LMCache's names do not tell them apart."""
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
            self._links = {each: link for each, link in self._links.items() if each in self._table}

    def chunk_of(self, resident: Resident) -> Chunk | None:
        """The last chunk that ends at or before a resident key, and behind the key before; None where there is none, or
        it is not known."""
        size, width = self._table.block_size, self._names.chunk_tokens
        if not size or width % size:
            return None
        blocks = resident.tokens // size
        chunks = blocks * size // width
        if chunks == 0 or chunks == (resident.tokens - resident.span_tokens) // size * size // width:
            return None
        block_hash: int | None = resident.block_hash
        for _ in range(blocks - chunks * (width // size)):
            block_hash = self._parent(block_hash)
        link = self._link(block_hash)
        if link is None:
            return None
        return Chunk(chunks * width, self._names.keys(link.state.previous_hash, link.salt)[0])

    def _parent(self, block_hash: int | None) -> int | None:
        block = self._blocks.get(block_hash) if block_hash is not None else None
        return block.parent if block is not None else None

    def _link(self, block_hash: int | None) -> _Link | None:
        """The chunk that ends with a block; None where not all blocks before it are known."""
        missing: list[tuple[int, list[_Block]]] = []
        link = None
        while block_hash is not None and (link := self._links.get(block_hash)) is None:
            blocks, end = [], block_hash
            for _ in range(self._names.chunk_tokens // self._table.block_size):
                block = self._blocks.get(block_hash) if block_hash is not None else None
                if block is None:
                    return None
                blocks.append(block)
                block_hash = block.parent
            missing.append((end, blocks))
        for end, blocks in reversed(missing):
            state, salt = (START, blocks[-1].salt) if link is None else link
            for block in reversed(blocks):
                state, _ = self._names.advance(state, _words(block.tokens))
            link = self._links[end] = _Link(state, salt)
        return link


def _words(tokens: bytes) -> Sequence[int]:
    return memoryview(tokens).cast("I")


def _salt(extra: Sequence[Any] | None, index: int) -> str:
    """vLLM names a request's salt, as it is, beside the tokens of its first block."""
    beside = extra[index] if extra is not None and index < len(extra) else None
    return next((each for each in beside or () if isinstance(each, str)), "")
