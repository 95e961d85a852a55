"""The CPU tier of vLLM's native offloading (vllm/v1/kv_offload), as far as anyone outside can see.

Every full block of a prompt that a step has on the GPU is also written to the tier, unless it is there; the write is
over when the next step is, and then the block is announced. Room is made when a write begins, by dropping the least
recently used blocks; blocks being written, or that the write itself is about, are never dropped, and a write that
cannot have its room is not made. A later prompt that the GPU no longer has is loaded from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.simulator.events import EventLog
from gateway.simulator.sequence import TokenSequence


class CpuTier:
    """A tier of no blocks is a replica without offloading."""

    def __init__(self, num_blocks: int, events: EventLog) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._blocks: OrderedDict[int, bool] = OrderedDict()
        """Its hashes, least recently used first, and whether they are written: only then can they be loaded or
        dropped. How recently one was used does not wait for that."""
        self._begun: list[tuple[int, TokenSequence, int]] = []
        self._ending: list[tuple[int, TokenSequence, int]] = []
        """Writes (hash, its sequence, its place there) of this step, and of the step before."""

    def __len__(self) -> int:
        """Blocks that can be loaded."""
        return sum(self._blocks.values())

    def __repr__(self) -> str:
        return f"<CpuTier {len(self)} ready, {len(self._blocks) - len(self)} in writing of {self._num_blocks}>"

    @property
    def is_writing(self) -> bool:
        """Whether the engine must go on stepping for it."""
        return bool(self._begun or self._ending)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of these, from the first on, can be loaded."""
        for count, block_hash in enumerate(hashes):
            if not self._blocks.get(block_hash, False):
                return count
        return len(hashes)

    def store(self, sequence: TokenSequence, num_tokens: int, block_size: int) -> None:
        """A step brings a sequence to `num_tokens`: begin to write what of its prompt is new to the tier."""
        if not self._num_blocks:
            return
        first, last = sequence.offered_blocks, min(num_tokens, sequence.prompt.num_tokens) // block_size
        sequence.offered_blocks = max(first, last)
        offered = sequence.hashes[first:last]
        missing = {block_hash: first + at for at, block_hash in enumerate(offered) if block_hash not in self._blocks}
        if self._make_room(len(missing), set(offered)):
            self._begun += [(block_hash, sequence, block) for block_hash, block in missing.items()]
            self._blocks.update(dict.fromkeys(missing, False))

    def end_step(self) -> None:
        """The writes that the step before began have arrived."""
        for block_hash, sequence, block in self._ending:
            self._blocks[block_hash] = True
            self._events.offloaded(sequence, block)
        self._ending, self._begun = self._begun, []

    def touch(self, hashes: Sequence[int]) -> None:
        """A request for these blocks has finished: the deepest of them will be dropped first."""
        for block_hash in reversed(hashes):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)

    def clear(self) -> None:
        """Forget everything. As in vLLM no event tells of it, and what is being written never arrives."""
        self._blocks.clear()
        self._begun, self._ending = [], []

    def _make_room(self, num_new: int, protected: set[int]) -> bool:
        surplus = len(self._blocks) + num_new - self._num_blocks
        if surplus <= 0:
            return True
        dropped: list[int] = []
        for block_hash, is_written in self._blocks.items():
            if len(dropped) == surplus:
                break
            if is_written and block_hash not in protected:
                dropped.append(block_hash)
        if len(dropped) < surplus:
            return False
        for block_hash in dropped:
            del self._blocks[block_hash]
        self._events.dropped(dropped)
        return True
