"""One engine: chunked prefill and batched decode over a block cache, in scaled time.

Each step first schedules the running requests (a chunk of prefill, or one token), then admits waiting requests in
order. It lasts max(one decode step, its prefill tokens / prefill rate) / speed. Blocks count as cached when they are
scheduled, so that two equal prompts that arrive together share their prefix; their KV events are published at the end
of the step. If running requests need more blocks than there are, the youngest is preempted: it loses its blocks and
becomes the first in the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.cache import Block, BlockCache
from gateway.simulator.events import Event, EventLog
from gateway.simulator.faults import Faults
from gateway.simulator.offload import CpuTier
from gateway.simulator.prompt import EnginePrompt
from gateway.simulator.sequence import EventTag, SequenceState, TokenSequence
from gateway.simulator.settings import SimSettings

if TYPE_CHECKING:
    from gateway.simulator.sim_lmcache import SimLmcache

_FULL_SPEED_BURST_STEPS = 16
"""At speed 0 the engine yields to the loop after this many steps, so that an answer of default length is one write."""
_LOAD_COST = 0.1
"""The time to load a token from the CPU tier, as a part of the time to prefill it."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; requests by how they finished (`stop`, `length`, `abort`)."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    external_queries_tokens: int = 0
    external_hits_tokens: int = 0
    preemptions: int = 0
    prefills: int = 0
    prefill_s: float = 0.0
    prefill_computed_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    """The time between a token and the one before it, summed over all tokens but the first of each answer."""
    transfers: int = 0
    """Prompts that were fetched from other servers."""
    blocks_stored: int = 0
    blocks_evicted: int = 0

    def prefilled(self, seconds: float, computed_tokens: int) -> None:
        """A request has finished. Its prefill of the uncached tokens took this long since it was scheduled."""
        self.prefills += 1
        self.prefill_s += seconds
        self.prefill_computed_tokens += computed_tokens


class SimEngine:
    """Calls `on_first_token` with the seconds since the request arrived, and `publish` with the KV events of each step
    that has any."""

    def __init__(
        self,
        settings: SimSettings,
        on_first_token: Callable[[float], None],
        publish: Callable[[list[Event]], None] | None = None,
        lmcache: SimLmcache | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.block_size = settings.block_size
        self.cache = BlockCache(settings.num_gpu_blocks)
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self.stats = EngineStats()
        self._events = EventLog(settings, publish)
        self.cpu_tier = CpuTier(settings.cpu_blocks, self._events)
        self._lmcache = lmcache
        self._faults = faults or Faults()
        self._loaded_tokens = 0
        """Tokens that the current step loads from outside the GPU."""
        self._load_s_per_token = lmcache.load_s_per_token if lmcache else _LOAD_COST / settings.prefill_tokens_per_s
        self._settings = settings
        self._on_first_token = on_first_token
        self._work = asyncio.Event()
        self._is_paused = False

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence. The caller has checked that its prompt and answer fit into the cache."""
        sequence.state = SequenceState.WAITING
        sequence.arrived_s = asyncio.get_running_loop().time()
        self.waiting.append(sequence)
        self._work.set()

    def abort(self, sequence: TokenSequence) -> None:
        """Remove a sequence at once and free its blocks. Does nothing if it has finished."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            return
        sequence.state = SequenceState.ABORTED
        self.stats.requests["abort"] += 1
        self._work.set()

    def abort_all(self) -> int:
        """End all requests as they are; returns their number. Their clients get what was generated, and the reason."""
        sequences = [*self.running, *self.waiting]
        for sequence in sequences:
            self.abort(sequence)
            sequence.notify(sequence)
        return len(sequences)

    def clear_cache(self) -> bool:
        """Reset the GPU's prefix cache. Returns False, and does nothing, while any block is in use."""
        cleared = self.cache.clear()
        if cleared:
            self._events.cleared()
        return cleared

    def set_paused(self, is_paused: bool) -> None:
        """While it is paused, it runs nothing."""
        self._is_paused = is_paused
        self._work.set()

    def reset_caches(self) -> None:
        """Reset all caches. Running requests lose their blocks, and wait again."""
        while self.running:
            self._preempt()
        self.clear_cache()
        self.cpu_tier.clear()

    def forget_idle(self) -> None:
        """Forget all blocks that no running request holds, on the GPU and in the CPU tier, without any event."""
        self.cache.forget_idle()
        self.cpu_tier.clear()

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        speed = self._settings.speed
        clock_s = loop.time()
        burst = 0
        while await self._faults.goes_on.wait():
            batch, prefill_tokens = self.schedule()
            if not batch and not self.cpu_tier.is_writing:
                self._work.clear()
                await self._work.wait()
                clock_s, burst = loop.time(), 0
                continue
            if speed > 0:
                # A clock of its own keeps the errors of the loop's timers from adding up.
                clock_s = max(clock_s + self._step_s(prefill_tokens) / speed, loop.time() - 0.1)
                await asyncio.sleep(max(0.0, clock_s - loop.time()))
            elif (burst := burst + 1) % _FULL_SPEED_BURST_STEPS == 0:
                await asyncio.sleep(0)
            self.finish_step(batch)

    def schedule(self) -> tuple[list[tuple[TokenSequence, int]], int]:
        """Choose what the next step computes: pairs of (sequence, tokens), and their number of prefill tokens."""
        batch: list[tuple[TokenSequence, int]] = []
        prefill_tokens = self._loaded_tokens = 0
        limit = self._settings.max_num_batched_tokens
        preempted = self.stats.preemptions
        if self._is_paused:
            return batch, prefill_tokens
        for sequence in tuple(self.running):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by a sequence before it
            want = sequence.num_tokens - sequence.computed
            if want > 1:
                want = min(want, limit - prefill_tokens)
            if want > 0 and self._grow_or_preempt(sequence, want):
                batch.append((sequence, want))
                prefill_tokens += want if want > 1 else 0
        if self.stats.preemptions > preempted:
            return batch, prefill_tokens
        at = 0
        while at < len(self.waiting) and len(self.running) < self._settings.max_num_seqs and prefill_tokens < limit:
            sequence = self.waiting[at]
            loadable_tokens = 0 if self._lmcache is None else self._lmcache.loadable_tokens(sequence, self._work.set)
            if loadable_tokens is None:
                at += 1  # the sequences behind it need not wait for its lookup
                continue
            loadable_tokens = max(loadable_tokens, sequence.remote_tokens)
            admitted = self._admit(sequence, limit - prefill_tokens, loadable_tokens)
            if admitted is None:
                break
            del self.waiting[at]
            self.running.append(sequence)
            batch.append((sequence, admitted))
            prefill_tokens += admitted
        return batch, prefill_tokens

    def finish_step(self, batch: list[tuple[TokenSequence, int]]) -> None:
        """Record the computed tokens, and give a token to every sequence that has finished its prefill.

        As in vLLM, the KV events of a step are published before its tokens.
        """
        self.cpu_tier.end_step()
        self._events.flush()
        for sequence, computed in batch:
            if sequence.state is not SequenceState.RUNNING:
                continue  # aborted while the step ran
            sequence.computed += computed
            if self._lmcache is not None:
                self._lmcache.store(sequence, sequence.computed)
            if sequence.is_prefilled:
                self._sample(sequence)

    def _step_s(self, prefill_tokens: int) -> float:
        computing_s = prefill_tokens / self._settings.prefill_tokens_per_s
        loading_s = self._loaded_tokens * self._load_s_per_token
        return self._faults.slowness * max(self._settings.decode_s_per_token, computing_s + loading_s)

    def _prefill_s(self, sequence: TokenSequence, now_s: float) -> float:
        """The time of a prefill, as metrics tell it. A machine cannot keep the time of a simulation that is faster than
        an engine: the time that was meant is told then, so that equal replicas tell the same."""
        speed = self._settings.speed
        if speed > 1:
            computed_tokens = sequence.prompt.num_tokens - (sequence.cached_tokens or 0)
            return self._faults.slowness * computed_tokens / self._settings.prefill_tokens_per_s / speed
        return now_s - sequence.scheduled_s if speed else 0.0

    def _sample(self, sequence: TokenSequence) -> None:
        now_s = asyncio.get_running_loop().time()
        if sequence.produced == 0:
            self.stats.prompt_tokens += sequence.prompt.num_tokens
            self._on_first_token(now_s - sequence.arrived_s)
            sequence.prefill_s = self._prefill_s(sequence, now_s)
        else:
            self.stats.decode_steps += 1
            self.stats.decode_s += now_s - sequence.last_token_s
        sequence.last_token_s = now_s
        if not sequence.is_complete:
            sequence.produce()
            self.stats.generation_tokens += 1
        if sequence.is_complete:
            sequence.state = SequenceState.FINISHED
            self.running.remove(sequence)
            self._release(sequence)
            self.cpu_tier.touch(sequence.hashes)
            self.stats.requests[sequence.answer.engine_reason] += 1
            self.stats.prefilled(sequence.prefill_s, sequence.prompt.num_tokens - sequence.told_cached_tokens)
        sequence.notify(sequence)

    def _admit(self, sequence: TokenSequence, limit_tokens: int, loadable_tokens: int) -> int | None:
        """Start a waiting sequence. Returns the tokens of its first step, or None if there are too few blocks."""
        # At least one token must be computed to sample from, so the block that holds the last is recomputed.
        reusable = (sequence.num_tokens - 1) // self.block_size
        hits = [] if self._faults.take("no_hits") else self.cache.match(sequence.hashes[:reusable])
        self._events.reused(sequence, len(hits))
        loaded = self.cpu_tier.match(sequence.hashes[len(hits) : reusable])
        loaded = max(loaded, min(reusable, loadable_tokens // self.block_size) - len(hits)) * self.block_size
        sequence.blocks = hits
        sequence.computed = len(hits) * self.block_size
        want = min(sequence.num_tokens - sequence.computed - loaded, limit_tokens)
        if not self._grow(sequence, want, hits, loaded):
            sequence.blocks = []
            return None
        if self._lmcache is not None:
            self._lmcache.load(loaded)
        sequence.state = SequenceState.RUNNING
        if sequence.cached_tokens is None:
            # As in vLLM, a prefill begins when what can be loaded is there: the time of loading is no part of it.
            loading_s = self._faults.slowness * loaded * self._load_s_per_token / (self._settings.speed or 1)
            sequence.scheduled_s = asyncio.get_running_loop().time() + loading_s
            sequence.cached_tokens = sequence.computed + loaded
            self.stats.prefix_queries_tokens += sequence.num_tokens
            self.stats.prefix_hits_tokens += sequence.computed
            self.stats.external_queries_tokens += sequence.num_tokens - sequence.computed
            self.stats.external_hits_tokens += loaded
        sequence.computed += loaded
        return want

    def _grow_or_preempt(self, sequence: TokenSequence, tokens: int) -> bool:
        while not self._grow(sequence, tokens):
            if self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> TokenSequence:
        """The youngest running sequence loses its blocks and becomes the first in the queue."""
        youngest = self.running.pop()
        self._release(youngest)
        youngest.state = SequenceState.WAITING
        self.waiting.appendleft(youngest)
        self.stats.preemptions += 1
        return youngest

    def _grow(self, sequence: TokenSequence, tokens: int, hits: Sequence[Block] = (), loaded_tokens: int = 0) -> bool:
        """Hold the blocks for `tokens` more of a sequence, its `hits` and the loaded tokens before them, and store the
        full ones. Returns False if there are too few blocks.

        Hashes enter and leave the cache only here.
        """
        loaded_end = sequence.computed + loaded_tokens
        end = loaded_end + tokens
        missing = -(-end // self.block_size) - len(sequence.blocks)
        if missing or hits:
            taken = self.cache.take(hits, missing)
            if taken is None:
                return False
            sequence.blocks += taken.blocks
            self._events.evicted(taken.evicted)
        self._loaded_tokens += loaded_tokens
        first = sequence.computed // self.block_size
        for last in (loaded_end // self.block_size, end // self.block_size):
            if last > first:
                self.cache.store(sequence.blocks[first:last], sequence.hashes[first:last])
                self.stats.blocks_stored += last - first
                self._events.stored(sequence, first, last)
            first = last
        self.cpu_tier.store(sequence, end, self.block_size)
        return True

    def _release(self, sequence: TokenSequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []


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
    """Everything one HTTP request generates: each prompt, `n` times each, on one engine. A handler calls `start`, waits
    for `progress`, takes `new_tokens` and, on every path out, calls `close`.

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

    def fetched(self, tokens: int, cached_tokens: int) -> None:
        """Another server has computed the prompt, of which it had so many tokens cached. Usage tells these."""
        self._engine.stats.transfers += 1
        for sequence in self.sequences:
            sequence.remote_tokens, sequence.remote_cached_tokens = tokens, cached_tokens

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
            sum(sequence.told_cached_tokens for sequence in firsts),
        )
