"""One prompt and its answer inside an engine: what the scheduler, the caches and the event log know of it.

The engine calls `TokenSequence.produce` for each token, then `notify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.cache import Block
from gateway.simulator.prompt import BlockHasher, EnginePrompt, token_of


class SequenceState(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class EventTag:
    """A request's options for the KV events that it causes."""

    session_id: str | None = None
    full_report: bool = False
    """Whether events also report the blocks that it reuses."""


@dataclass(slots=True)
class ChunkLookup:
    """What LMCache knows of one prompt's chunks."""

    names: list[str]
    found: int | None = None
    """How many chunks can be loaded, counted from the first one; None while LMCache still looks for them."""
    offered: int = 0
    """How many chunks LMCache keeps or has found, counted from the first one."""


class TokenSequence:
    """A prompt and its planned answer inside an engine."""

    __slots__ = (
        "_hasher", "answer", "arrived_s", "blocks", "cached_tokens", "computed", "event_tag", "last_token_s", "lookup",
        "notify", "num_tokens", "offered_blocks", "prefill_s", "produced", "prompt", "scheduled_s", "state", "taken",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: EnginePrompt,
        answer: GeneratedAnswer,
        block_size: int,
        event_tag: EventTag,
        notify: Callable[[TokenSequence], None],
    ) -> None:
        """The engine calls `notify` with the sequence at each new token and at its end."""
        self.prompt = prompt
        self.answer = answer
        self.event_tag = event_tag
        self.notify = notify
        self.state = SequenceState.NEW
        self.arrived_s = self.scheduled_s = self.prefill_s = self.last_token_s = 0.0
        self.tokens = bytearray(prompt.tokens)
        self.num_tokens = prompt.num_tokens
        """Prompt and generated tokens so far."""
        self.computed = 0
        """How many of these have their KV in `blocks`."""
        self.cached_tokens: int | None = None
        """Prompt tokens that were found in the cache when it was first scheduled."""
        self.produced = 0
        self.taken = 0
        """Generated tokens that the handler has taken."""
        self.blocks: list[Block] = []
        self.offered_blocks = 0
        """How many blocks of its prompt were offered to the CPU tier."""
        self.lookup: ChunkLookup | None = None
        """The lookup of its prompt in LMCache, once it has begun."""
        self._hasher = BlockHasher(prompt, block_size)
        self._hasher.extend(prompt.tokens)

    @property
    def hashes(self) -> list[int]:
        """The hashes of the full blocks of `tokens`."""
        return self._hasher.hashes

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= self.num_tokens

    @property
    def is_complete(self) -> bool:
        return self.produced == len(self.answer.pieces)

    def extra_keys(self, first: int, last: int) -> list[tuple[object, ...] | None]:
        """The extra keys of each block from `first` up to `last`."""
        return self._hasher.extra_keys(first, last)

    def produce(self) -> None:
        """Sample the next token."""
        self.tokens += token_of(self.answer.pieces[self.produced])
        self._hasher.extend(self.tokens)
        self.num_tokens += 1
        self.produced += 1
