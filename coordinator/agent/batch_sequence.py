"""Decides which batch is next, which came before, which are lost, and whether the engine restarted. Pure.

An engine numbers its batches from 0 and keeps the last of them in a ring, from which it replays. Live batches come in
order, but may be dropped on the way. Batches of a replay may be dropped too, even in its middle: the engine drops
batches that its socket does not take. All batches of an engine process from its first up to `expected` are accounted
for. The batch before `expected` is the anchor. It stays in the ring of the same process until newer batches displace
it. Therefore every replay is requested from the anchor: its timestamp tells processes apart, and an empty answer means
another process.

    live()  ->  deliver | drop | hold it and want a replay
    ask()  ->  replayed()…  ->  ended()  ->  done | want another replay, from further on

Between two Restarted, each number is in exactly one Received or Lost, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.agent.kv_events import Batch


@dataclass(frozen=True, slots=True)
class Received:
    """The next batch."""

    seq: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Lost:
    """The batches from `first_seq` up to, but not including, `next_seq` are lost for good."""

    first_seq: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """Another process of the engine: its cache began empty, and its numbering begins at 0."""


Item = Received | Lost | Restarted


@dataclass(frozen=True, slots=True)
class _Held:
    """A live batch that waits for a replay. `batch` is None if its payload could not be decoded."""

    seq: int
    batch: Batch | None
    suspect: bool
    """It came over a new connection, with a number that was received before: it is another process's, unless a replay
    shows otherwise."""


class BatchSequence:
    """Puts the live batches and the replays of one engine into one order. A batch that cannot be decoded is None."""

    def __init__(self) -> None:
        self.expected = 0
        self.asking = True
        """Whether a replay is wanted; if so, a replay that is under way must be abandoned."""
        self._last_ts: float | None = None
        self._newest_ts: float | None = None
        """The latest of this process. The engine's clock may be set back, so it can differ from `_last_ts`."""
        self._proven = True
        """Whether a batch has shown that the engine is the process in which `expected` counts."""
        self._held: _Held | None = None
        # Of the replay that is under way:
        self._replaying = False
        self._anchor: tuple[int, float | None] = (-1, None)
        self._last_reply: int | None = None
        self._has_advanced = False
        self._in_question: _Held | None = None

    @property
    def holding(self) -> bool:
        """Whether a live batch waits for a replay. Do not call `live` again until the replay has ended."""
        return self._held is not None

    def live(self, seq: int, batch: Batch | None, *, reconnected: bool) -> list[Item]:
        """A batch that was just published. `reconnected`: it is the first over a new connection, so another process
        may have published it, whatever its number is.
        """
        if reconnected:
            self._held = _Held(seq, batch, suspect=seq < self.expected)
            self._proven = False
            self.asking = True
            return []
        if seq == self.expected and not self._is_out_of_time(batch):
            return [self._take(seq, batch)]
        if seq >= self.expected:
            self._held = _Held(seq, batch, suspect=False)
            self.asking = self.asking or not self._replaying
            return []
        if self._is_of_another_process(batch):
            self._held = _Held(seq, batch, suspect=False)
            return [self._restart()]
        return []

    def ask(self) -> int:
        """A replay begins. Returns its first number."""
        self.asking = False
        self._replaying = True
        self._anchor = (self.expected - 1, self._last_ts)
        self._last_reply = None
        self._has_advanced = False
        self._in_question = self._held
        return max(self.expected - 1, 0)

    def replayed(self, seq: int, batch: Batch | None) -> list[Item]:
        """The next batch of the replay that is under way."""
        anchor_seq, anchor_ts = self._anchor
        begins = self._last_reply is None or self._last_reply <= anchor_seq
        self._last_reply = seq
        known_ts = self._last_ts if seq == self.expected - 1 else anchor_ts if seq == anchor_seq else None
        if batch is not None and known_ts is not None and batch.ts != known_ts:
            return [self._restart_by_replay()]
        if batch is not None and seq == anchor_seq:
            self._note(seq, batch)
        self._proven = True
        if seq < self.expected:
            return []
        lost: list[Item] = []
        if seq > self.expected:
            if not begins:
                self.asking = True
                return []
            lost = [Lost(self.expected, seq)]
        self._has_advanced = True
        return [*lost, self._take(seq, batch)]

    def ended(self, *, complete: bool) -> list[Item]:
        """The replay has ended, by itself (`complete`) or because it was given up."""
        self._replaying = False
        held = self._held
        if complete and self._last_reply is None and self._anchor[0] >= 0:
            return [self._restart_by_replay()]
        if self._has_advanced and not complete:
            self.asking = True
        elif held is not None and held.seq >= self.expected:
            # It was published before it arrived, so a replay that was asked later has it, unless replies were dropped.
            self.asking = self._has_advanced or (complete and held is not self._in_question)
        if self.asking or held is None:
            return []
        self._held = None
        return self._settle(held, is_known_missing=complete)

    def _settle(self, held: _Held, *, is_known_missing: bool) -> list[Item]:
        """No replay will tell more about `held`. `is_known_missing`: the engine has no batches beyond those taken."""
        is_stale = is_known_missing and self._is_out_of_time(held.batch)
        if held.seq >= self.expected and not is_stale:
            lost: list[Item] = [Lost(self.expected, held.seq)] if held.seq > self.expected else []
            return [*lost, self._take(held.seq, held.batch)]
        if held.suspect and not self._proven:
            self._held = _Held(held.seq, held.batch, suspect=False)
            return [self._restart()]
        return []

    def _is_out_of_time(self, batch: Batch | None) -> bool:
        """Whether a batch is older than the last one: the clock was set back, or an earlier process published it."""
        return batch is not None and self._last_ts is not None and batch.ts < self._last_ts

    def _is_of_another_process(self, batch: Batch | None) -> bool:
        """Whether a live batch with a number that was received before comes from another process of the engine."""
        return batch is not None and self._newest_ts is not None and batch.ts > self._newest_ts

    def _take(self, seq: int, batch: Batch | None) -> Item:
        self.expected = seq + 1
        self._proven = True
        self._last_ts = None
        if batch is None:
            return Lost(seq, seq + 1)
        self._note(seq, batch)
        return Received(seq, batch)

    def _note(self, seq: int, batch: Batch) -> None:
        if seq == self.expected - 1:
            self._last_ts = batch.ts
        self._newest_ts = batch.ts if self._newest_ts is None else max(self._newest_ts, batch.ts)

    def _restart(self) -> Item:
        self.expected = 0
        self._last_ts = self._newest_ts = None
        self._proven = True
        self.asking = True
        return Restarted()

    def _restart_by_replay(self) -> Item:
        """Drop the held batch: it came before the replay was requested. So it belongs to the old process, or the new
        process's ring has it."""
        self._held = None
        return self._restart()
