"""One prompt and its answer inside an engine: what the scheduler, the caches and the event log know of it.

The engine calls `TokenSequence.produce` for each token, then `notify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
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


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A prompt and its planned answer inside an engine, which calls `notify` with the sequence at each new token and at
    its end."""

    prompt: EnginePrompt
    answer: GeneratedAnswer
    block_size: InitVar[int]
    event_tag: EventTag
    notify: Callable[[TokenSequence], None]
    hasher: BlockHasher = field(init=False)
    tokens: bytearray = field(init=False)
    num_tokens: int = field(init=False)
    """Prompt and generated tokens so far."""
    state: SequenceState = SequenceState.NEW
    arrived_s: float = 0.0
    scheduled_s: float = 0.0
    prefill_s: float = 0.0
    last_token_s: float = 0.0
    computed: int = 0
    """How many tokens have their KV in `blocks`."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the cache when it was first scheduled."""
    produced: int = 0
    taken: int = 0
    """Generated tokens that the handler has taken."""
    blocks: list[Block] = field(default_factory=list)
    offered_blocks: int = 0
    """How many blocks of its prompt were offered to the CPU tier."""
    remote_tokens: int = 0
    """Those of its prompt that were fetched from another server."""
    remote_cached_tokens: int | None = None
    """Those that the other server had cached."""
    lookup: ChunkLookup | None = None
    """The lookup of its prompt in LMCache, once it has begun."""

    def __post_init__(self, block_size: int) -> None:
        self.tokens = bytearray(self.prompt.tokens)
        self.num_tokens = self.prompt.num_tokens
        self.hasher = BlockHasher(self.prompt, block_size)
        self.hasher.extend(self.tokens)

    @property
    def hashes(self) -> list[int]:
        """The hashes of the full blocks of `tokens`."""
        return self.hasher.hashes

    @property
    def told_cached_tokens(self) -> int:
        """What usage and metrics tell. As in vLLM, of a prompt that was fetched, it is what the other server had."""
        told = self.cached_tokens if self.remote_cached_tokens is None else self.remote_cached_tokens
        return told or 0

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= self.num_tokens

    @property
    def is_complete(self) -> bool:
        return self.produced == len(self.answer.pieces)

    def produce(self) -> None:
        """Sample the next token."""
        self.tokens += token_of(self.answer.pieces[self.produced])
        self.hasher.extend(self.tokens)
        self.num_tokens += 1
        self.produced += 1
