from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.simulator.cache import Block, BlockCache


def hold(cache: BlockCache, hashes: list[int]) -> tuple[list[Block], list[int]]:
    """Stores blocks as a request does; returns its blocks and the evicted hashes."""
    hits = cache.match(hashes)
    taken = cache.take(hits, len(hashes) - len(hits))
    assert taken is not None
    cache.store(taken.blocks, hashes[len(hits) :])
    return hits + taken.blocks, taken.evicted


def test_the_deepest_block_of_a_request_is_evicted_first() -> None:
    cache = BlockCache(4)
    blocks, _ = hold(cache, [1, 2, 3, 4])
    cache.release(blocks)
    _, evicted = hold(cache, [10, 11])
    assert evicted == [4, 3]
    assert len(cache.match([1, 2, 3, 4])) == 2


def test_the_least_recently_used_prefix_is_evicted_first_and_a_hit_refreshes_all_of_it() -> None:
    cache = BlockCache(4)
    for prefix in ([1, 2], [3, 4]):
        blocks, _ = hold(cache, prefix)
        cache.release(blocks)
    refreshed, _ = hold(cache, [1, 2])
    cache.release(refreshed)
    _, evicted = hold(cache, [5, 6])
    assert evicted == [4, 3]


def test_a_take_that_fails_changes_nothing() -> None:
    cache = BlockCache(3)
    blocks, _ = hold(cache, [1, 2])
    cache.release(blocks)
    assert cache.take(cache.match([1, 2]), 2) is None
    _, evicted = hold(cache, [7, 8])
    assert evicted == [2]


class CacheMachine(RuleBasedStateMachine):
    """Requests over a few shared prefixes come and go. All counts must be right after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(8)
        self.running: list[list[Block]] = []
        self.resident: dict[int, int] = {}

    @rule(prefix=st.integers(0, 2), depth=st.integers(1, 5), reuse=st.booleans())
    def arrive(self, prefix: int, depth: int, reuse: bool) -> None:
        hashes = [prefix * 100 + at for at in range(depth)]
        hits = self.cache.match(hashes) if reuse else []
        taken = self.cache.take(hits, depth - len(hits))
        if taken is None:
            return
        self.cache.store(taken.blocks, hashes[len(hits) :])
        for block_hash in taken.evicted:
            self.resident[block_hash] -= 1
        for block_hash in hashes[len(hits) :]:
            self.resident[block_hash] = self.resident.get(block_hash, 0) + 1
        self.running.append(hits + taken.blocks)

    @rule(which=st.integers(0, 7))
    def leave(self, which: int) -> None:
        if self.running:
            self.cache.release(self.running.pop(which % len(self.running)))

    @invariant()
    def what_was_stored_and_not_evicted_is_what_can_be_hit(self) -> None:
        resident = {block_hash for block_hash, copies in self.resident.items() if copies}
        assert {block_hash for block_hash in self.resident if self.cache.match([block_hash])} == resident
        assert self.cache.num_cached == len(resident)

    @invariant()
    def held_blocks_are_those_of_running_requests(self) -> None:
        held = {block.index for blocks in self.running for block in blocks}
        assert self.cache.num_held == len(held)


TestCacheMachine = pytest.mark.filterwarnings("default")(CacheMachine.TestCase)
