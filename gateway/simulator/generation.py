"""Everything one HTTP request generates, and the wait for its tokens.

A handler calls `start`, waits for `progress`, takes `new_tokens` and, on every path out, calls `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.engine import SimEngine
from gateway.simulator.prompt import EnginePrompt
from gateway.simulator.sequence import EventTag, SequenceState, TokenSequence

_UNTAGGED = EventTag()


@dataclass(frozen=True, slots=True)
class SimUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Generation:
    """Everything one HTTP request generates: each prompt, `n` times each, on one engine.

    With `each_token`, every token wakes the waiting handler; without, only the end does.
    """

    def __init__(
        self,
        engine: SimEngine,
        prompts: Sequence[EnginePrompt],
        answers: list[GeneratedAnswer],
        each_token: bool = False,
        tag: EventTag = _UNTAGGED,
    ) -> None:
        """`answers` holds the same number of answers for each prompt, in the prompts' order. If the engine aborts one,
        the list gets what there is of it."""
        self.sequences: list[TokenSequence] = []
        self._engine = engine
        self._answers = answers
        self._each_token = each_token
        self._news = asyncio.Event()
        self._n = len(answers) // len(prompts)
        for at, answer in enumerate(answers):
            prompt = prompts[at // self._n]
            self.sequences.append(TokenSequence(prompt, answer, engine.block_size, tag, self._notify))
        self._unfinished = len(self.sequences)

    @property
    def finished(self) -> bool:
        """Everything is generated, or `close` was called."""
        return self._unfinished == 0

    def start(self) -> None:
        for sequence in self.sequences:
            self._engine.add(sequence)

    def close(self) -> None:
        """Abort unfinished sequences, and wake the waiting handler. Does nothing after a normal end."""
        if not self.finished:
            for sequence in self.sequences:
                self._engine.abort(sequence)
            self._unfinished = 0
            self._news.set()

    async def progress(self) -> None:
        """Wait for something new. Only one task may wait at a time."""
        await self._news.wait()
        self._news.clear()

    async def completion(self) -> None:
        """Run to the end. Aborts if cancelled."""
        try:
            self.start()
            while not self.finished:
                await self.progress()
        finally:
            self.close()

    def _notify(self, sequence: TokenSequence) -> None:
        """`sequence` has a new token, has finished, or was aborted by the engine."""
        if sequence.state is SequenceState.ABORTED:
            at = self.sequences.index(sequence)
            self._answers[at] = sequence.answer.aborted(sequence.produced)
            sequence.produced += 1
        if sequence.state in (SequenceState.FINISHED, SequenceState.ABORTED):
            self._unfinished -= 1
        if self._each_token or self._unfinished == 0:
            self._news.set()

    def new_tokens(self) -> Iterator[tuple[int, int]]:
        """The tokens since the last call, as (choice, place of the token in its answer)."""
        for choice, sequence in enumerate(self.sequences):
            while sequence.taken < sequence.produced:
                sequence.taken += 1
                yield choice, sequence.taken - 1

    def usage(self) -> SimUsage:
        """The token counts. Each prompt counts once, however many choices it has."""
        firsts = self.sequences[:: self._n]
        return SimUsage(
            sum(sequence.prompt.num_tokens for sequence in firsts),
            sum(each.produced - (each.state is SequenceState.ABORTED) for each in self.sequences),
            sum(sequence.cached_tokens or 0 for sequence in firsts),
        )
