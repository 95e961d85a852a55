"""Turns an engine's events into transitions of prefix keys: which became resident, where, and which are gone. Pure.

A cache that evicts the tail of a prompt first holds everything before a block that it holds. So a key is resident
exactly while its last block is. One block is watched for each key: the last that ends at or before it. The blocks of
keys that are gone are watched too: when any prompt computes them again, their keys are resident again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coordinator.agent.blocks import MEDIA, BlockTable
from coordinator.agent.chains import Binding, Bindings, KeyEnd, places, prompt_end, sure_places
from coordinator.agent.kv_events import Cleared, Event, Removed, Stored
from coordinator.agent.token_sizes import TokenPlaces
from coordinator.engine.facts import SESSIONS_SINCE

_MAX_EXACT = 8192
_MAX_FIRM = 500_000
_MAX_UNBOUND = 8192
_MAX_GONE = 32_768
_UNREMOVED_S = 3600.0
"""As long as an unused claim is believed."""
_MAX_KEYS_AT_BLOCK = 256
"""All short questions about one document end in the document's last block, and so do the keys of one image under many
URLs. The keys that were named last are kept."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A key's prefix is held: `tokens` in all, `span_tokens` of them after the key before, the last in `block_hash`."""

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
    """All earlier transitions are void."""


Transition = Resident | Evicted | Reset


class Residency:
    """One engine's residency. Methods return the transitions that they cause, in order."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.names_sessions = False
        """Whether the engine's events name sessions, as far as it is known."""
        self.is_relearning = False
        """Whether the engine may hold blocks that no event has named."""
        self.capacity_tokens = 0
        """Of the engine's GPU cache; 0 if unknown."""
        self._residents = ResidentKeys(self.table)
        self._firm: OrderedDict[str, None] = OrderedDict()
        """Keys that a measured prompt has placed."""
        self._exact: OrderedDict[str, int] = OrderedDict()
        self._bindings = Bindings()
        self._unbound: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Sessions whose chain is not known: the last block, and how many blocks up to it were stored one at a time."""
        self._relearned_at = 0

    def __len__(self) -> int:
        return len(self._residents)

    def expect(self, block_size: int, capacity_tokens: int, version: tuple[int, ...]) -> None:
        """The engine's own figures; 0 and empty if it does not tell them."""
        self.table.block_size = block_size
        self.capacity_tokens = capacity_tokens
        if version:
            self.names_sessions = version >= SESSIONS_SINCE

    def residents(self) -> Iterable[Resident]:
        """Everything that is resident now."""
        return self._residents.all()

    def find(self, key: str) -> Resident | None:
        """The key's residency now; None if it is not resident."""
        return self._residents.find(key) if key in self._residents else None

    def is_bound(self, session: str) -> bool:
        """Whether the session's chain is known."""
        return session in self._bindings

    @property
    def held_tokens(self) -> int:
        """The tokens in all blocks of which events tell that the engine holds them."""
        return len(self.table) * self.table.block_size

    def apply(self, events: Iterable[Event], now_s: float = 0.0) -> list[Transition]:
        """Apply one batch of the engine's events, which happened at `now_s` by the engine's clock."""
        changes: list[Transition] = []
        self.table.now_s = now_s
        for event in events:
            if isinstance(event, Stored):
                changes += self._store(event)
            elif isinstance(event, Removed):
                changes += self._residents.refresh(self.table.remove(event))
            elif isinstance(event, Cleared):
                changes += self._clear(event.medium)
        changes += self._residents.refresh(self.table.expire(now_s - _UNREMOVED_S))
        stored_tokens = (self.table.stored - self._relearned_at) * self.table.block_size
        if self.is_relearning and 0 < self.capacity_tokens <= stored_tokens:
            self._end_relearning()
        return changes

    def bind(self, binding: Binding) -> list[Transition]:
        """Add a chain, before its session's events or after them."""
        self._bindings.put(binding)
        last, alone = self._unbound.pop(binding.tip, (None, 0))
        return self._extend(binding, [last], None, alone) if last is not None and last in self.table else []

    def measure(self, tip: str, prompt_tokens: int) -> list[Transition]:
        """The engine has told how long a prompt was."""
        binding = self._bindings.get(tip)
        if binding is None or prompt_tokens <= 0:
            return []
        binding.prompt_tokens, binding.is_measured = prompt_tokens, True
        self._exact[tip] = prompt_tokens
        self._exact.move_to_end(tip)
        if len(self._exact) > _MAX_EXACT:
            self._exact.popitem(last=False)
        if not binding.is_complete(self.table.block_size):
            path = self.table.path(binding.last) or []
            if len(path) > len(binding.path) and path[: len(binding.path)] == binding.path:
                self._adopt(binding, path)
        return self._resolve(binding)

    def assume(self, resident: Resident, is_complete: bool) -> None:
        """Take over a key from the last agent; if the events are complete, only if they have its block."""
        if is_complete and resident.block_hash not in self.table:
            return
        size = self.table.block_size
        if size and resident.tokens >= size and self._residents.find(resident.key) is None:
            self.table.assume(resident.block_hash, resident.medium, resident.tokens // size - 1)
            self._residents.watch(resident.key, resident.tokens, resident.span_tokens, resident.block_hash)

    def reset(self, relearn: bool) -> list[Transition]:
        """Forget everything. `relearn`: events are missing, and the engine still has blocks."""
        self.table.clear()
        self._residents.clear()
        self._firm.clear()
        self._unbound.clear()
        self._bindings.forget_paths()
        self.is_relearning = False
        if relearn:
            self.relearn()
        return [Reset()]

    def relearn(self) -> None:
        """The engine may hold blocks that no event has named, until it has stored as many as its cache has."""
        self.is_relearning, self._relearned_at = True, self.table.stored
        self.table.doubt()

    def void(self, keys: Iterable[str]) -> list[Transition]:
        """The engine was found not to serve these keys. They count again when events name them again."""
        changes: list[Transition] = []
        for key in keys:
            self._firm.pop(key, None)
            changes += self._residents.forget(key)
        return changes

    def _clear(self, medium: str) -> list[Transition]:
        """A medium was emptied. What others hold stays."""
        if medium == MEDIA[0] and not self.table.holds_beside(medium):
            return self.reset(relearn=False)
        gone = self.table.clear_medium(medium)
        if medium == MEDIA[0]:
            self._end_relearning()
        return self._residents.refresh(gone)

    def _end_relearning(self) -> None:
        self.is_relearning = False
        self.table.trust()

    def _store(self, event: Stored) -> list[Transition]:
        binding = self._bindings.get(event.session) if event.session else None
        self.table.store(event, reporting=binding is not None and binding.is_report)
        self.names_sessions |= bool(event.session)
        changes = self._residents.refresh(event.hashes)
        if event.session and event.is_prefix and event.hashes and event.hashes[-1] in self.table:
            is_alone = len(event.hashes) == 1
            if binding is not None:
                return changes + self._extend(binding, event.hashes, event.parent, int(is_alone))
            _, alone = self._unbound.get(event.session, (0, 0))
            self._unbound[event.session] = (event.hashes[-1], alone + 1 if is_alone else 0)
            self._unbound.move_to_end(event.session)
            if len(self._unbound) > _MAX_UNBOUND:
                self._unbound.popitem(last=False)
        return changes

    def _extend(self, binding: Binding, hashes: Sequence[int], parent: int | None, alone: int) -> list[Transition]:
        """The session's events have named these blocks, which follow `parent`. `alone` blocks, up to the last, were
        stored one at a time."""
        follows = parent is not None and parent == binding.last
        binding.last = hashes[-1]
        # An answer follows its prompt, and fills one block at a time.
        is_answer = binding.is_complete(self.table.block_size) and (binding.is_measured or len(hashes) == 1)
        if is_answer and follows and all(key in self._residents for key in binding.expected):
            return []
        if follows and not is_answer and binding.path[-1:] == [parent]:
            longer = [*binding.path, *hashes]
            _make_sure(binding, longer, alone, self.table.block_size)
            self._adopt(binding, longer)
            return self._resolve(binding)
        path = self.table.path(binding.last)
        if path is None:
            if not self.is_relearning:  # no event has named its beginning
                self.relearn()
            return []
        _make_sure(binding, path, alone, self.table.block_size)
        common = min(len(path), len(binding.path))
        if path[:common] != binding.path[:common]:  # the image at a URL has changed
            binding.is_measured = False
            self._exact.pop(binding.tip, None)
            self._adopt(binding, path)
        elif len(path) > common and not is_answer:
            self._adopt(binding, path)
        return self._resolve(binding)

    def _adopt(self, binding: Binding, path: list[int]) -> None:
        # After unknown blocks, it is not known which of the chain's images comes first.
        self._bindings.set_path(binding, path, self.table.media_spans(path) if path and path[0] else [])

    def _resolve(self, binding: Binding) -> list[Transition]:
        """Place every key of a chain that ends within its path."""
        size, path, spans = self.table.block_size, binding.path, binding.spans
        if not path or not size:
            return []
        end = prompt_end(binding, len(path) * size, size)
        if spans and spans[-1].end == len(path) * size:  # the image may continue in the next block
            spans = [*spans[:-1], replace(spans[-1], end=max(end, spans[-1].end))]
        changes: list[Transition] = []
        binding.expected = []
        token_places = TokenPlaces(self.table.text_bytes(path), size)
        for place in sure_places(binding, places(binding, spans, end, self._exact, token_places), size):
            index = place.tokens // size
            if index > len(path):
                break
            if not index:
                changes += self._residents.forget(place.key)
            elif path[index - 1]:
                binding.expected.append(place.key)
                changes += self._place(place, path, index)
        if binding.is_measured:
            self._firm.update(dict.fromkeys(binding.expected))
            while len(self._firm) > _MAX_FIRM:
                self._firm.popitem(last=False)
        return changes

    def _place(self, place: KeyEnd, path: Sequence[int], index: int) -> list[Transition]:
        """The key's last block is `path[index - 1]`."""
        size, known = self.table.block_size, self._residents.find(place.key)
        if known is not None and not place.is_exact:
            index = min(index, self._agreed(known, path) or index)
        block_hash = path[index - 1]
        tokens = min(place.tokens, (index + 1) * size - 1)
        if known is not None:
            before = path[known.tokens // self.table.block_size - 1 :][:1]
            may_stay = place.key in self._firm and not place.is_exact and before in ([], [known.block_hash])
            # An engine always computes a prompt's last token: if the prompt ends with a block, it serves one less.
            is_served = not place.is_exact or (tokens - 1) // size == (known.tokens - 1) // size
            if may_stay or (known.block_hash == block_hash and is_served):
                # Chains that share a key place it a few tokens apart. It stays, or every request would move it.
                self._residents.touch(known)
                return []
        self._firm.pop(place.key, None)
        span_tokens = max(0, place.span_tokens - (place.tokens - tokens))
        return self._residents.watch(place.key, tokens, span_tokens, block_hash)

    def _agreed(self, known: Resident, path: Sequence[int]) -> int:
        """How many blocks two chains with one key have in common, if both place the key after these blocks; else 0. The
        chains share the key's whole prefix, so the key ends within these blocks or in the next."""
        before = known.tokens // self.table.block_size
        if not 0 < before <= len(path) or path[before - 1] == known.block_hash:
            return 0
        other = self.table.path(known.block_hash) or []
        return next((at for at, (a, b) in enumerate(zip(other, path, strict=False)) if a != b), 0)


class ResidentKeys:
    """The keys whose last block is known. Methods return the transitions that they cause, in order."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._known: dict[str, Resident] = {}
        """`medium` is empty if the block is gone."""
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
        """The last block of a key, even if it is gone (then `medium` is empty); None if the key is not known."""
        return self._known.get(key)

    def watch(self, key: str, tokens: int, span_tokens: int, block_hash: int) -> list[Transition]:
        """Set a key's last block."""
        if key in self._known:
            self._unwatch(self._known[key])
        keys = self._at.setdefault(block_hash, {})
        keys[key] = None
        changes = self._set(Resident(key, tokens, span_tokens, self._table.medium_of(block_hash) or "", block_hash))
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
        """Blocks were stored on a medium or removed from it."""
        changes: list[Transition] = []
        for block_hash in hashes:
            if block_hash not in self._at:
                continue
            medium = self._table.medium_of(block_hash) or ""
            for key in list(self._at[block_hash]):
                if self._known[key].medium != medium:
                    changes += self._set(replace(self._known[key], medium=medium))
        return changes

    def forget(self, key: str) -> list[Transition]:
        """The end of a key is no longer known."""
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

    def _set(self, resident: Resident) -> list[Transition]:
        """Set the state of a key whose block is watched already."""
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


def _make_sure(binding: Binding, path: Sequence[int], alone: int, block_size: int) -> None:
    """Update `sure_blocks` after the session's events have led to this path. No estimate is so wrong that the answer
    begins in the first half of the estimated prompt."""
    common = min(len(path), binding.sure_blocks)
    sure = binding.sure_blocks if path[:common] == binding.path[:common] else 0
    if not alone or 2 * len(path) * block_size <= binding.prompt_tokens:
        binding.sure_blocks = max(sure, len(path))
    else:
        binding.sure_blocks = sure or len(path) - alone
