"""One engine's KV cache: a fixed number of physical blocks, found again by hash.

A block is *held* while a running request refers to it. Free blocks wait in one queue, least recently used first. A
free block keeps its hash until the cache reuses it, which is its eviction. A request releases its blocks in reverse, so
that the deepest blocks are evicted first and a resident block practically implies its whole prefix. Its last block, if
it is not full, can serve no other request and is reused first. Several physical blocks may have the same hash (a fully
cached prompt recomputes its last block). As in vLLM, each of them is stored and evicted separately, and a hit takes the
oldest one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Sequence
from dataclasses import dataclass


class Block:
    """A physical block; `hash` is None until it is full."""

    __slots__ = ("hash", "index", "refs")

    def __init__(self, index: int) -> None:
        self.index = index
        self.refs = 0
        self.hash: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """New blocks for a request, and the hashes that were evicted to make room, in that order."""

    blocks: list[Block]
    evicted: list[int]


class BlockCache:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = OrderedDict((index, Block(index)) for index in range(num_blocks))
        self._cached: dict[int, Block] = {}
        self._twins: dict[int, list[Block]] = {}
        """Further blocks with a hash that `_cached` already has, oldest first."""

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Distinct hashes that a request can hit."""
        return len(self._cached)

    def match(self, hashes: Sequence[int]) -> list[Block]:
        """The blocks of the longest cached prefix of `hashes`. Touches nothing."""
        hits: list[Block] = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def take(self, hits: Sequence[Block], num_new: int) -> Taken | None:
        """Hold `hits` and `num_new` more blocks. Returns None, and changes nothing, if there are too few."""
        idle_hits = sum(block.refs == 0 for block in hits)
        if num_new > len(self._free) - idle_hits:
            return None
        for block in hits:
            if block.refs == 0:
                del self._free[block.index]
            block.refs += 1
        taken = Taken([], [])
        for _ in range(num_new):
            _, block = self._free.popitem(last=False)
            if block.hash is not None:
                taken.evicted.append(block.hash)
                self._forget(block)
            block.refs = 1
            taken.blocks.append(block)
        return taken

    def store(self, blocks: Sequence[Block], hashes: Sequence[int]) -> None:
        """Make full blocks findable by their hashes. All of them count as newly stored."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.hash = block_hash
            if self._cached.setdefault(block_hash, block) is not block:
                self._twins.setdefault(block_hash, []).append(block)

    def release(self, blocks: Sequence[Block]) -> None:
        """Release a request's blocks (shallow to deep). The deepest one will be evicted first."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                self._free[block.index] = block
                if block.hash is None:
                    self._free.move_to_end(block.index, last=False)

    def clear(self) -> bool:
        """Forget all hashes; refused (False) while any block is held, as in vLLM."""
        if self.num_held:
            return False
        for block in self._free.values():
            block.hash = None
        self._cached.clear()
        self._twins.clear()
        return True

    def forget_idle(self) -> None:
        """Forget the hashes of all free blocks; those of held blocks stay."""
        for block in self._free.values():
            if block.hash is not None:
                self._forget(block)

    def hashes(self) -> KeysView[int]:
        """All hashes that a request can hit."""
        return self._cached.keys()

    def _forget(self, block: Block) -> None:
        block_hash, block.hash = block.hash, None
        assert block_hash is not None
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._cached[block_hash]
            return
        if self._cached[block_hash] is block:
            self._cached[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]
