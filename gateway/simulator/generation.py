"""One request's sequences, and the wait for their tokens.

The engine calls `TokenSequence.produce` and `Generation.notify`; a handler calls `start`, waits for `progress`, takes
`new_tokens` and, on every path out, calls `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.cache import Block
from gateway.simulator.prompt import BlockHasher, EnginePrompt, token_of

if TYPE_CHECKING:
    from gateway.simulator.engine import SimEngine
    from gateway.simulator.lmcache import Lookup


class State(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SimUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class EventTag:
    """What a request wants of the KV events that it causes."""

    session_id: str | None = None
    full_report: bool = False
    """Tell of the blocks that it reuses, too."""


_UNTAGGED = EventTag()


class TokenSequence:
    """A prompt and its planned answer on their way through an engine."""

    __slots__ = (
        "_hasher", "answer", "arrived_s", "blocks", "cached_tokens", "computed", "generation", "lookup", "num_tokens",
        "offered_blocks", "prefill_s", "produced", "prompt", "scheduled_s", "state", "taken", "tokens",
    )  # fmt: skip

    def __init__(self, prompt: EnginePrompt, answer: GeneratedAnswer, block_size: int, generation: Generation) -> None:
        self.prompt = prompt
        self.answer = answer
        self.generation = generation
        self.state = State.NEW
        self.arrived_s = self.scheduled_s = self.prefill_s = 0.0
        self.tokens = bytearray(prompt.tokens)
        self.num_tokens = prompt.num_tokens
        """Prompt and generated tokens so far."""
        self.computed = 0
        """Of those, the ones whose KV is in `blocks`."""
        self.cached_tokens: int | None = None
        """Prompt tokens that were found in the cache when it was first scheduled."""
        self.produced = 0
        self.taken = 0
        """Generated tokens that the handler has taken."""
        self.blocks: list[Block] = []
        self.offered_blocks = 0
        """Of its prompt, those that the CPU tier has been offered."""
        self.lookup: Lookup | None = None
        """What LMCache has of its prompt, once that was asked for."""
        self._hasher = BlockHasher(prompt, block_size)
        self._hasher.extend(prompt.tokens)

    @property
    def hashes(self) -> list[int]:
        """Of the full blocks of `tokens`."""
        return self._hasher.hashes

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= self.num_tokens

    @property
    def is_complete(self) -> bool:
        return self.produced == len(self.answer.pieces)

    def extra_keys(self, first: int, last: int) -> list[tuple[object, ...] | None]:
        """What entered the hash of each block from `first` up to `last` beside its tokens."""
        return self._hasher.extra_keys(first, last)

    def produce(self) -> None:
        """Sample the next token."""
        self.tokens += token_of(self.answer.pieces[self.produced])
        self._hasher.extend(self.tokens)
        self.num_tokens += 1
        self.produced += 1


class Generation:
    """Everything one HTTP request generates: each prompt, `n` times each, on one engine.

    With `each_token` a waiting handler is woken for every token, else only when all is done.
    """

    def __init__(
        self,
        engine: SimEngine,
        prompts: Sequence[EnginePrompt],
        answers: Sequence[GeneratedAnswer],
        each_token: bool = False,
        tag: EventTag = _UNTAGGED,
    ) -> None:
        """`answers` holds the same number of answers for each prompt, in the prompts' order."""
        self.sequences: list[TokenSequence] = []
        self.tag = tag
        self._engine = engine
        self._each_token = each_token
        self._ready = False
        self._waiter: asyncio.Future[None] | None = None
        self._n = len(answers) // len(prompts)
        for at, answer in enumerate(answers):
            self.sequences.append(TokenSequence(prompts[at // self._n], answer, engine.block_size, self))
        self._unfinished = len(self.sequences)

    @property
    def finished(self) -> bool:
        """All is generated, or it was closed before."""
        return self._unfinished == 0

    def start(self) -> None:
        for sequence in self.sequences:
            self._engine.add(sequence)

    def close(self) -> None:
        """Abort what has not finished, and wake who waits for it; does nothing after a normal end."""
        if not self.finished:
            for sequence in self.sequences:
                self._engine.abort(sequence)
            self._unfinished = 0
            self._wake()

    async def progress(self) -> None:
        """Wait until there is something new; for one waiter at a time."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._ready = False

    async def completion(self) -> None:
        """Run to the end; aborts if cancelled."""
        try:
            self.start()
            while not self.finished:
                await self.progress()
        finally:
            self.close()

    def notify(self, sequence: TokenSequence) -> None:
        """`sequence` has a new token, or has finished."""
        if sequence.state is State.FINISHED:
            self._unfinished -= 1
        if self._each_token or self._unfinished == 0:
            self._wake()

    def _wake(self) -> None:
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def new_tokens(self) -> Iterator[tuple[int, int]]:
        """What came since the last call: (choice, place of a token in its answer)."""
        for choice, sequence in enumerate(self.sequences):
            while sequence.taken < sequence.produced:
                sequence.taken += 1
                yield choice, sequence.taken - 1

    def usage(self) -> SimUsage:
        """Prompts count once each, however many choices they have."""
        firsts = self.sequences[:: self._n]
        return SimUsage(
            sum(sequence.prompt.num_tokens for sequence in firsts),
            sum(sequence.produced for sequence in self.sequences),
            sum(sequence.cached_tokens or 0 for sequence in firsts),
        )
