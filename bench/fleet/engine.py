"""One light engine: the simulated replica's block cache under a timing model that needs two or three timers a request.

Prompts are computed one after another, in order of arrival, at a fixed rate. After that, an answer takes a fixed time
for each token, whatever else runs. Blocks count as cached when their prompt is scheduled, as in the simulator
(gateway/simulator/engine.py), and the cache is the simulator's. So requests that come one after another find the same
blocks cached here and there.

In contrast to the simulator: nothing is preempted, and a prefill does not slow running answers. The blocks of an answer
are taken at its end. KV events are published when a prompt is scheduled and when its answer has ended, instead of after
each step.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from bench.fleet.settings import LightSettings
from coordinator.agent.kv_events import Cleared, Event, Removed, Stored
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.cache import Block, BlockCache
from gateway.simulator.engine import EngineStats
from gateway.simulator.prompt import TOKEN_BYTES, BlockHasher, EnginePrompt
from gateway.simulator.sequence import EventTag

_MEDIUM = "gpu"
_GROUP = 0


class LightSequence:
    """One prompt and its answer inside an engine."""

    __slots__ = (
        "answer", "blocks", "cached_tokens", "hasher", "is_over", "prefilled_s", "prompt", "scheduled_s", "tag",
        "when_prefilled",
    )  # fmt: skip

    def __init__(
        self,
        prompt: EnginePrompt,
        answer: GeneratedAnswer,
        block_tokens: int,
        tag: EventTag,
        when_prefilled: Callable[[], None],
    ) -> None:
        """The engine calls `when_prefilled` as soon as the prompt is computed, and forgets it: it may refer to the
        sequence, and a cycle would keep both in memory (see replicas.py)."""
        self.prompt = prompt
        self.answer = answer
        self.tag = tag
        self.when_prefilled: Callable[[], None] | None = when_prefilled
        self.hasher = BlockHasher(prompt, block_tokens)
        self.hasher.extend(prompt.tokens)
        self.blocks: list[Block] = []
        self.cached_tokens = 0
        self.scheduled_s = 0.0
        self.prefilled_s: float | None = None
        self.is_over = False


class LightEngine:
    """Calls `publish` with the KV events of each change to its cache, in order."""

    def __init__(self, settings: LightSettings, publish: Callable[[list[Event]], None]) -> None:
        self.settings = settings
        self.cache = BlockCache(settings.num_blocks)
        self.stats = EngineStats()
        self.waiting: deque[LightSequence] = deque()
        self.running: set[LightSequence] = set()
        self._publish = publish
        self._is_prefilling = False

    def __repr__(self) -> str:
        return f"<LightEngine {len(self.running)} running, {len(self.waiting)} waiting, {self.cache!r}>"

    def submit(self, sequence: LightSequence) -> None:
        """Queue a sequence. The caller calls `finish` or `abort` for it."""
        self.waiting.append(sequence)
        self._admit()

    def generated_tokens(self) -> int:
        """The tokens of all answers until now. Gateways read from this that the engine makes progress."""
        now_s, token_s = asyncio.get_running_loop().time(), self.settings.decode_s_per_token / self.settings.speed
        begun = ((each.prefilled_s, len(each.answer.pieces)) for each in self.running if each.prefilled_s is not None)
        return self.stats.generation_tokens + sum(min(most, int((now_s - at) / token_s)) for at, most in begun)

    def finish(self, sequence: LightSequence) -> None:
        """Its last token is generated: cache the full blocks of its answer, and free all of its blocks."""
        tokens = sequence.prompt.tokens + _tokens_of(sequence.answer)
        sequence.hasher.extend(tokens)
        # The last token is sampled, but nothing is computed from it.
        self._store(sequence, tokens, sequence.prompt.num_tokens, len(tokens) // TOKEN_BYTES - 1)
        self.stats.generation_tokens += len(sequence.answer.pieces)
        self.stats.requests[sequence.answer.engine_reason] += 1
        self._leave(sequence)

    def abort(self, sequence: LightSequence) -> None:
        """Its client has gone: free its blocks. Does nothing if it is over."""
        if sequence.is_over:
            return
        if sequence in self.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            sequence.is_over, sequence.when_prefilled = True, None
        self.stats.requests["abort"] += 1

    def clear_cache(self) -> bool:
        """Forget all blocks. Returns False, and does nothing, while any block is in use."""
        cleared = self.cache.clear()
        if cleared:
            self._publish([Cleared()])
        return cleared

    def _leave(self, sequence: LightSequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.blocks)
        sequence.blocks = []
        sequence.is_over, sequence.when_prefilled = True, None
        self._admit()

    def _admit(self) -> None:
        """Schedule the first waiting prompt, unless another one is computed now or there is no room."""
        if self._is_prefilling or not self.waiting or len(self.running) >= self.settings.max_running:
            return
        sequence = self.waiting[0]
        if not self._schedule(sequence):
            return  # the end of a running answer frees blocks
        self.waiting.popleft()
        self.running.add(sequence)
        self._is_prefilling = True
        loop = asyncio.get_running_loop()
        sequence.scheduled_s = loop.time()
        uncached_tokens = sequence.prompt.num_tokens - sequence.cached_tokens
        seconds = uncached_tokens / self.settings.prefill_tokens_per_s / self.settings.speed
        loop.call_later(seconds, self._prefilled, sequence)

    def _prefilled(self, sequence: LightSequence) -> None:
        self._is_prefilling = False
        if not sequence.is_over:
            now_s = sequence.prefilled_s = asyncio.get_running_loop().time()
            self.stats.prompt_tokens += sequence.prompt.num_tokens
            uncached_tokens = sequence.prompt.num_tokens - sequence.cached_tokens
            self.stats.prefilled(now_s - sequence.scheduled_s, uncached_tokens)
            then, sequence.when_prefilled = sequence.when_prefilled, None
            assert then is not None
            then()
        self._admit()

    def _schedule(self, sequence: LightSequence) -> bool:
        """Take the blocks of a prompt. Returns False if there are too few."""
        block_tokens, hashes = self.settings.block_tokens, sequence.hasher.hashes
        num_tokens = sequence.prompt.num_tokens
        # At least one token must be computed to sample from, so the block that holds the last is recomputed.
        hits = self.cache.match(hashes[: (num_tokens - 1) // block_tokens])
        taken = self.cache.take(hits, -(-num_tokens // block_tokens) - len(hits))
        if taken is None:
            return False
        sequence.blocks = [*hits, *taken.blocks]
        sequence.cached_tokens = len(hits) * block_tokens
        self.stats.prefix_queries_tokens += num_tokens
        self.stats.prefix_hits_tokens += sequence.cached_tokens
        tokens = sequence.prompt.tokens
        reused = [self._stored(sequence, tokens, 0, len(hits))] if sequence.tag.full_report and hits else []
        self._cached(sequence, tokens, len(hits), num_tokens // block_tokens, [*reused, *self._evicted(taken.evicted)])
        return True

    def _store(self, sequence: LightSequence, tokens: bytes, before: int, end: int) -> None:
        """Cache the full blocks up to token `end`, of which those up to token `before` are cached. If there is no room,
        they are not cached."""
        block_tokens = self.settings.block_tokens
        taken = self.cache.take((), -(-end // block_tokens) - len(sequence.blocks))
        if taken is not None:
            sequence.blocks += taken.blocks
            self._cached(sequence, tokens, before // block_tokens, end // block_tokens, self._evicted(taken.evicted))

    def _cached(self, sequence: LightSequence, tokens: bytes, first: int, last: int, events: list[Event]) -> None:
        """Blocks `first` to `last` (exclusive) of a sequence are now cached. Publishes that after `events`."""
        if last > first:
            self.cache.store(sequence.blocks[first:last], sequence.hasher.hashes[first:last])
            self.stats.blocks_stored += last - first
            events = [*events, self._stored(sequence, tokens, first, last)]
        if events:
            self._publish(events)

    def _stored(self, sequence: LightSequence, tokens: bytes, first: int, last: int) -> Stored:
        width, hashes = self.settings.block_tokens * TOKEN_BYTES, sequence.hasher.hashes
        return Stored(
            hashes=hashes[first:last],
            parent=hashes[first - 1] if first else None,
            tokens=array("I", tokens[first * width : last * width]).tolist(),
            block_size=self.settings.block_tokens,
            medium=_MEDIUM,
            extra=list(sequence.hasher.extra_keys(first, last)),
            group=_GROUP,
            is_prefix=True,
            session=sequence.tag.session_id,
            lora=sequence.prompt.lora,
        )

    def _evicted(self, hashes: Sequence[int]) -> list[Event]:
        self.stats.blocks_evicted += len(hashes)
        return [Removed([each], _MEDIUM, _GROUP) for each in hashes]


def _tokens_of(answer: GeneratedAnswer) -> bytes:
    """The same as `answer.tokens`. Most answers are ASCII words of a whole token each: these need no loop."""
    text = "".join(answer.pieces)
    is_plain = text.isascii() and set(map(len, answer.pieces)) == {TOKEN_BYTES}
    return text.encode() if is_plain else answer.tokens
