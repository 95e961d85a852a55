"""The CPU tier of vLLM's native offloading (vllm/v1/kv_offload), as it looks from the outside.

Every full prompt block that a step has on the GPU is also written to the tier, unless the tier has it. The write ends
with the next step, and then an event announces the block. A write makes room when it begins, by dropping the least
recently used blocks. It never drops blocks that are being written, or its own; if there is not enough room, it is
skipped. A later prompt that is no longer on the GPU is loaded from the tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from gateway.simulator.events import EventLog
from gateway.simulator.sequence import TokenSequence


class CpuTier:
    """The CPU tier. One without blocks is a replica without offloading."""

    def __init__(self, num_blocks: int, events: EventLog) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._blocks: OrderedDict[int, bool] = OrderedDict()
        """Its hashes, least recently used first, and whether each is completely written. Only a written block can be
        loaded or dropped; its position in the order does not depend on that."""
        self._begun: list[tuple[int, TokenSequence, int]] = []
        self._ending: list[tuple[int, TokenSequence, int]] = []
        """The writes of this step and of the step before: (hash, sequence, index of the block in it)."""

    def __len__(self) -> int:
        """The number of blocks that can be loaded."""
        return sum(self._blocks.values())

    @property
    def is_writing(self) -> bool:
        """Whether the engine must run further steps for it."""
        return bool(self._begun or self._ending)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of these blocks can be loaded, counted from the first one."""
        return next((at for at, each in enumerate(hashes) if not self._blocks.get(each)), len(hashes))

    def store(self, sequence: TokenSequence, num_tokens: int, block_size: int) -> None:
        """A step brings a sequence to `num_tokens`: begin to write the prompt blocks that are new to the tier."""
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
        """End the writes that the step before began."""
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
        """Forget everything. As in vLLM, there is no event, and running writes never end."""
        self._blocks.clear()
        self._begun, self._ending = [], []

    def _make_room(self, num_new: int, protected: set[int]) -> bool:
        surplus = len(self._blocks) + num_new - self._num_blocks
        if surplus <= 0:
            return True
        idle = (each for each, is_written in self._blocks.items() if is_written and each not in protected)
        dropped = list(islice(idle, surplus))
        if len(dropped) < surplus:
            return False
        for block_hash in dropped:
            del self._blocks[block_hash]
        self._events.dropped(dropped)
        return True
