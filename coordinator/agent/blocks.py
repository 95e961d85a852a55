"""Which KV blocks an engine holds, on which medium, and where in a prompt each one lies. Pure.

A block's hash covers everything before it, so its parents are its prompt. Several physical blocks may have one hash
(two equal prompts computed side by side). Each is stored and removed on its own, so the table counts them. If a count
is uncertain (blocks that were stored before the table began), the first removal means that the block is gone.

There are some hundred thousand blocks, so the table has dicts by hash, and no object for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.agent.kv_events import Removed, Stored
from coordinator.agent.token_sizes import TokenSizes, Weight

MEDIA = ("gpu", "cpu")
"""Fastest first. Blocks on other media are ignored: nothing predicts them yet."""
_MAX_UNREMOVED = 1_000_000
"""Blocks in CPU memory that are believed while nobody has said that one is gone."""
_ROOT = -1
_UNKNOWN = -2


@dataclass(frozen=True, slots=True)
class Medium:
    """The part of an image (or other medium) in a block: its start and its end, in tokens from the block's start. The
    start is negative if the image began in an earlier block. `placeholder` is the token id that stands for it."""

    identifier: str
    start: int
    end: int
    placeholder: int


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The place of a medium in a prompt, in tokens."""

    identifier: str
    start: int
    end: int


class BlockTable:
    """The blocks that one engine holds now."""

    def __init__(self) -> None:
        self.block_size = 0
        """Tokens in a block; 0 before the first event."""
        self.stored = 0
        """Blocks stored on the GPU since the table began."""
        self._parents: dict[int, int] = {}
        """For every block that is held."""
        self._counts: dict[str, dict[int, int]] = {medium: {} for medium in MEDIA}
        self._uncertain: set[int] = set()
        self._is_certain = True
        self._media: dict[int, tuple[Medium, ...]] = {}
        self._indexes: dict[int, int] = {}
        """The places in their prompts, counted from 0, of blocks whose ancestors are not known."""
        self._group: int | None = None
        """The group that is watched: the first one that holds whole prefixes."""
        self._other_groups: set[int | None] = set()
        self.now_s = 0.0
        """The time of the last events, by the engine's clock."""
        self._used_s: dict[int, float] = {}
        """When each block in CPU memory was last stored or loaded, the longest ago first: see `expire`."""
        self._tells_removals = False
        self._told_size = 0
        self.sizes = TokenSizes()
        self._weights: dict[int, Weight] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._parents

    @property
    def is_hybrid(self) -> bool:
        """Whether the engine has groups of blocks beside the watched one: sliding windows, states, other layers. It
        serves a prefix only if it has the blocks of all groups."""
        return bool(self._other_groups)

    @property
    def tells_prefixes(self) -> bool:
        """Whether a group holds whole prefixes, as far as events have told."""
        return self._group is not None or not self._other_groups

    def medium_of(self, block_hash: int) -> str | None:
        """The fastest medium that holds a block; None if none does."""
        for medium, counts in self._counts.items():
            if block_hash in counts:
                return medium
        return None

    def store(self, event: Stored, reporting: bool = False) -> None:
        """Add an event's blocks. A `reporting` session also names blocks that it reuses; they are not counted."""
        if event.medium not in MEDIA or not self._is_watched(event) or not self._is_whole(event):
            return
        parents, counts = self._parents, self._counts[event.medium]
        parent = event.parent
        if parent is None:
            parent = _ROOT if event.tokens else _UNKNOWN
        is_doubtful = reporting or not self._is_certain
        has_media = event.extra is not None and any(event.extra)
        for index, block_hash in enumerate(event.hashes):
            known = parents.get(block_hash)
            if known is None or known == _UNKNOWN:
                parents[block_hash] = parent
            if has_media and block_hash not in self._media:
                self._note_media(event, index, parent, block_hash)
            if block_hash not in self._weights:
                self._weigh(event, index, block_hash)
            if known is None and is_doubtful:
                self._uncertain.add(block_hash)
            if not (reporting and block_hash in counts):
                counts[block_hash] = counts.get(block_hash, 0) + 1
            parent = block_hash
        if event.medium == "gpu" and not reporting:
            self.stored += len(event.hashes)
        if event.medium == "cpu" or self._used_s:
            self._use(event)

    def remove(self, event: Removed) -> list[int]:
        """Remove an event's blocks; returns the hashes of which the medium has no block left."""
        counts = self._counts.get(event.medium)
        if counts is None or event.group in self._other_groups:
            return []
        if event.medium == "cpu" and not self._tells_removals:
            self._tells_removals = True
            self._used_s.clear()
        gone = []
        for block_hash in event.hashes:
            count = counts.get(block_hash)
            if count is None:
                continue
            if count > 1 and block_hash not in self._uncertain:
                counts[block_hash] = count - 1
                continue
            del counts[block_hash]
            gone.append(block_hash)
            if self.medium_of(block_hash) is None:
                self._forget(block_hash)
        return gone

    def expire(self, unused_since_s: float) -> list[int]:
        """Whoever stores blocks in CPU memory may never say that they are gone. Until somebody has said so once, blocks
        that were not used since then count as gone; returns their hashes."""
        gone: list[int] = []
        for block_hash, used_s in self._used_s.items():
            if used_s >= unused_since_s and len(self._used_s) - len(gone) <= _MAX_UNREMOVED:
                break
            gone.append(block_hash)
        self._drop("cpu", gone)
        return gone

    def holds_beside(self, medium: str) -> bool:
        """Whether another medium holds blocks."""
        return any(counts for name, counts in self._counts.items() if name != medium)

    def clear_medium(self, medium: str) -> list[int]:
        """A medium holds nothing any more; returns the hashes of what it held."""
        gone = list(self._counts.get(medium, ()))
        self._drop(medium, gone)
        return gone

    def _drop(self, medium: str, hashes: Sequence[int]) -> None:
        counts = self._counts.get(medium, {})
        for block_hash in hashes:
            counts.pop(block_hash, None)
            self._used_s.pop(block_hash, None)
            if self.medium_of(block_hash) is None:
                self._forget(block_hash)

    def assume(self, block_hash: int, medium: str, index: int) -> None:
        """Assume that the engine holds this block, at place `index` of its prompt: the last agent knew it."""
        if block_hash in self._parents:
            return
        self._parents[block_hash] = _UNKNOWN
        self._indexes[block_hash] = index
        self._uncertain.add(block_hash)
        self._counts[medium][block_hash] = 1
        if medium == "cpu" and not self._tells_removals:
            self._used_s[block_hash] = self.now_s

    def doubt(self) -> None:
        """Every count is uncertain from now on; until `trust`, so are the counts of new blocks."""
        self._is_certain = False
        self._uncertain.update(self._parents)

    def trust(self) -> None:
        """New blocks are counted again."""
        self._is_certain = True

    def clear(self) -> None:
        """Forget all blocks."""
        self._parents.clear()
        for counts in self._counts.values():
            counts.clear()
        self._media.clear()
        self._weights.clear()
        self._indexes.clear()
        self._uncertain.clear()
        self._used_s.clear()
        self.stored = 0
        self._is_certain = True

    def path(self, block_hash: int) -> list[int] | None:
        """The hashes of a block's prompt, first block first; None if the block's place is not known. Where only the
        place of a block is known, the blocks before it are 0."""
        path, parents = [], self._parents
        while block_hash != _ROOT:
            parent = parents.get(block_hash)
            if parent is None:
                return None
            path.append(block_hash)
            if parent == _UNKNOWN:
                index = self._indexes.get(block_hash)
                if index is None:
                    return None
                path += [0] * index
                break
            block_hash = parent
        path.reverse()
        return path

    def media_spans(self, path: Sequence[int]) -> list[MediaSpan]:
        """The media along a path, in order. Parts with the same start belong to one medium."""
        spans: list[MediaSpan] = []
        if not self._media:
            return spans
        for index, block_hash in enumerate(path):
            for medium in self._media.get(block_hash, ()):
                at = index * self.block_size
                span = MediaSpan(medium.identifier, at + medium.start, at + medium.end)
                if spans and spans[-1].start == span.start:
                    spans[-1] = span
                else:
                    spans.append(span)
        return spans

    def text_bytes(self, path: Sequence[int]) -> list[int]:
        """The bytes of text in each block of a path, without media. A block that is not known counts as the mean of
        the others."""
        found = [self.sizes.total(self._weights[each]) if each in self._weights else None for each in path]
        known = [size for size in found if size is not None]
        mean = sum(known) // len(known) if known else self.block_size
        return [mean if size is None else size for size in found]

    def _weigh(self, event: Stored, index: int, block_hash: int) -> None:
        size = event.block_size
        tokens = event.tokens[index * size : (index + 1) * size]
        if not tokens:
            return
        media = self._media.get(block_hash, ())
        if media:
            tokens = [t for at, t in enumerate(tokens) if not any(m.start <= at < m.end for m in media)]
        self._weights[block_hash] = self.sizes.measure(tokens)

    def _is_watched(self, event: Stored) -> bool:
        """Whether an event is of the watched group. All groups name their blocks by the same hashes, so only one of
        them can be counted."""
        if event.is_prefix and (event.group is None or self._group in (None, event.group)):
            if event.medium == "gpu":
                self._group = event.group
            return True
        if event.medium == "gpu":
            self._other_groups.add(event.group)
        return False

    def _use(self, event: Stored) -> None:
        """Blocks were stored in CPU memory, or are on the GPU now: maybe they were loaded from there."""
        for block_hash in event.hashes if not self._tells_removals else ():
            if event.medium == "cpu" or block_hash in self._used_s:
                self._used_s.pop(block_hash, None)
                self._used_s[block_hash] = self.now_s

    def _is_whole(self, event: Stored) -> bool:
        """Whether an event's blocks have this table's size. Engines also name parts of a block; and KV stores behind
        them publish blocks of other sizes, under other hashes."""
        if event.medium != "gpu":
            return event.block_size in (0, self.block_size) or not self.block_size
        if event.block_size < self._told_size or not event.block_size:
            return False
        self._told_size = self.block_size = event.block_size
        return True

    def _note_media(self, event: Stored, index: int, parent: int, block_hash: int) -> None:
        size = event.block_size
        tokens = event.tokens[index * size : (index + 1) * size]
        extra = event.extra[index] if event.extra is not None and index < len(event.extra) else None
        if extra and len(tokens) == size and tokens:
            media = self._read_media(extra, tokens, parent)
            if media:
                self._media[block_hash] = media

    def _read_media(self, extra: Sequence[Any], tokens: Sequence[int], parent: int) -> tuple[Medium, ...]:
        pairs = [(str(each[0]), int(each[1])) for each in extra if _is_medium(each) and each[1] < len(tokens)]
        media = []
        for at, (identifier, start) in enumerate(pairs):
            limit = pairs[at + 1][1] if at + 1 < len(pairs) else len(tokens)
            before = self._media.get(parent, ()) if start < 0 else ()
            placeholder = next((m.placeholder for m in reversed(before) if m.identifier == identifier), None)
            if placeholder is None:
                placeholder = tokens[max(0, start)]
            media.append(Medium(identifier, start, _end_of_run(tokens, max(0, start), limit, placeholder), placeholder))
        return tuple(media)

    def _forget(self, block_hash: int) -> None:
        self._parents.pop(block_hash, None)
        self._uncertain.discard(block_hash)
        self._media.pop(block_hash, None)
        self._weights.pop(block_hash, None)
        self._indexes.pop(block_hash, None)


def _is_medium(extra: Any) -> bool:
    return isinstance(extra, list | tuple) and len(extra) == 2 and isinstance(extra[1], int)


def _end_of_run(tokens: Sequence[int], start: int, limit: int, placeholder: int) -> int:
    """The index after the last placeholder. Some models put row breaks between a medium's placeholders."""
    for index in range(limit - 1, start - 1, -1):
        if tokens[index] == placeholder:
            return index + 1
    return start
