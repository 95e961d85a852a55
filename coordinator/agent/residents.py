"""Which keys end in which blocks, and which of them are resident. Pure.

One block is watched for each key: the last that ends at or before it. The blocks of keys that are gone are watched as
well: whoever computes them again, their keys are resident again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from coordinator.agent.blocks import BlockTable

_MAX_GONE = 32_768
_MAX_KEYS_AT_BLOCK = 256
"""Every short question behind one document ends in the document's last block, and so do the keys of one image under
many URLs. The ones named last are kept."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A key's prefix is held: `tokens` of it, `span_tokens` of them since the key before, up to `block_hash`."""

    key: str
    tokens: int
    span_tokens: int
    medium: str
    block_hash: int


@dataclass(frozen=True, slots=True)
class Evicted:
    key: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Nothing that was said before holds any more."""


Transition = Resident | Evicted | Reset


class Residents:
    """The keys whose last block is known. Methods return the transitions that they cause, in order."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._known: dict[str, Resident] = {}
        """`medium` is empty where the block is gone."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._at: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._known) - len(self._gone)

    def __contains__(self, key: str) -> bool:
        return key in self._known and key not in self._gone

    def all(self) -> list[Resident]:
        """Every resident key."""
        return [each for each in self._known.values() if each.medium]

    def find(self, key: str) -> Resident | None:
        """What is known of a key, though it may be gone."""
        return self._known.get(key)

    def watch(self, key: str, tokens: int, span_tokens: int, block_hash: int) -> list[Transition]:
        """A key's last block is this, and no other."""
        if key in self._known:
            self._unwatch(self._known[key])
        keys = self._at.setdefault(block_hash, {})
        keys[key] = None
        changes = self._say(Resident(key, tokens, span_tokens, self._table.medium_of(block_hash) or "", block_hash))
        if len(keys) > _MAX_KEYS_AT_BLOCK:
            changes += self.forget(next(iter(keys)))
        return changes

    def touch(self, known: Resident) -> None:
        """The key was named again."""
        keys = self._at[known.block_hash]
        if len(keys) > 1:
            del keys[known.key]
            keys[known.key] = None

    def refresh(self, hashes: Iterable[int]) -> list[Transition]:
        """Blocks came to a medium or left one."""
        changes: list[Transition] = []
        for block_hash in hashes:
            if block_hash not in self._at:
                continue
            medium = self._table.medium_of(block_hash) or ""
            for key in list(self._at[block_hash]):
                if self._known[key].medium != medium:
                    changes += self._say(replace(self._known[key], medium=medium))
        return changes

    def forget(self, key: str) -> list[Transition]:
        """Where a key ends is no longer known."""
        known = self._known.pop(key, None)
        if known is None:
            return []
        self._unwatch(known)
        self._gone.pop(key, None)
        return [Evicted(key)] if known.medium else []

    def clear(self) -> None:
        self._known.clear()
        self._gone.clear()
        self._at.clear()

    def _say(self, resident: Resident) -> list[Transition]:
        """What holds of a key now; its block is watched already."""
        was_resident = resident.key in self
        self._known[resident.key] = resident
        if resident.medium:
            self._gone.pop(resident.key, None)
            return [resident]
        self._gone[resident.key] = None
        if len(self._gone) > _MAX_GONE:
            self.forget(next(iter(self._gone)))
        return [Evicted(resident.key)] if was_resident else []

    def _unwatch(self, known: Resident) -> None:
        keys = self._at[known.block_hash]
        del keys[known.key]
        if not keys:
            del self._at[known.block_hash]
