"""Residency against a model: whatever an engine does to its cache, the reported residents are the blocks that it holds.

The simulated engine behaves as vLLM's events show. A block's hash covers all blocks before it. A prompt finds its
cached blocks from the front. The least recently used block is evicted first, and the end of a prompt before its
beginning. If a prompt is cached to its end, its last block is computed again (a twin). Prompts are stored in chunks,
and answers block by block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.agent.chains import Binding
from coordinator.agent.kv_events import Cleared, Event, Removed, Stored
from coordinator.agent.residency import Evicted, Residency, Resident, Transition

SIZE = 4
KEY_TOKENS = 3
"""A key ends after each 3 tokens, and at the end of a prompt."""
BYTES_PER_TOKEN = 5


def block_hash(tokens: Sequence[int]) -> int:
    return hash((7, *tokens)) & 0xFFFF_FFFF_FFFF_FFFF


def key_of(tokens: Sequence[int]) -> str:
    return "key " + " ".join(map(str, tokens))


@dataclass
class Request:
    """A prompt is stored `chunk_blocks` blocks at a time; `answer` is generated after the prompt."""

    prompt: list[int]
    answer: list[int]
    chunk_blocks: int
    is_bound: str
    """The binding comes "before" the events, "after" them, or "never"."""
    estimate_tokens: int
    is_report: bool

    @property
    def tip(self) -> str:
        return key_of(self.prompt)

    def ends(self) -> list[int]:
        return sorted({*range(KEY_TOKENS, len(self.prompt), KEY_TOKENS), len(self.prompt)})

    def binding(self) -> Binding:
        ends = self.ends()
        return Binding(
            tip=self.tip,
            keys=[key_of(self.prompt[:end]) for end in ends],
            text_bytes=[end * BYTES_PER_TOKEN for end in ends],
            image_counts=[0] * len(ends),
            prompt_tokens=self.estimate_tokens,
            is_report=self.is_report,
        )


@dataclass
class Engine:
    """A prefix cache of `gpu_blocks`, and another of `cpu_blocks` (0: none) to which every block is copied."""

    gpu_blocks: int
    cpu_blocks: int = 0
    cached: Counter[int] = field(default_factory=Counter)
    cpu: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free: list[int] = field(default_factory=list)
    """The hashes in the physical blocks that no request holds, in order of eviction; 0 for an empty block."""

    def __post_init__(self) -> None:
        self.free = [0] * self.gpu_blocks

    def medium_of(self, block: int) -> str:
        return "gpu" if self.cached[block] else "cpu" if block in self.cpu else ""

    def steps(self, request: Request) -> Iterator[list[Event]]:
        """The event batches that a request causes."""
        tokens = [*request.prompt, *request.answer]
        hashes = [block_hash(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
        prompt_blocks = len(request.prompt) // SIZE
        hits = 0
        while hits < (len(request.prompt) - 1) // SIZE and self.cached[hashes[hits]]:
            self.free.remove(hashes[hits])
            hits += 1
        if hits and request.is_report:
            yield [self._stored(request, tokens, hashes, 0, hits)]
        starts = [*range(hits, prompt_blocks, request.chunk_blocks), *range(prompt_blocks, len(hashes))]
        for start, stop in zip(starts, [*starts[1:], len(hashes)], strict=False):
            yield self._store(request, tokens, hashes, start, stop)
        self.free += reversed(hashes)

    def _store(self, request: Request, tokens: list[int], hashes: list[int], start: int, stop: int) -> list[Event]:
        events: list[Event] = []
        for block in hashes[start:stop]:
            victim = self.free.pop(0)
            if victim:
                self.cached[victim] -= 1
                events.append(Removed([victim], "gpu", 0))
            self.cached[block] += 1
        events.append(self._stored(request, tokens, hashes, start, stop))
        return events + [event for at in range(start, stop) for event in self._offload(tokens, hashes, at)]

    def _offload(self, tokens: list[int], hashes: list[int], at: int) -> Iterator[Event]:
        if not self.cpu_blocks or hashes[at] in self.cpu:
            return
        if len(self.cpu) == self.cpu_blocks:
            yield Removed([self.cpu.popitem(last=False)[0]], "cpu", 0)
        self.cpu[hashes[at]] = None
        behind = hashes[at - 1] if at else None
        yield Stored([hashes[at]], behind, tokens[at * SIZE : (at + 1) * SIZE], SIZE, "cpu", None, 0, True, None)

    def _stored(self, request: Request, tokens: list[int], hashes: list[int], start: int, stop: int) -> Stored:
        parent = hashes[start - 1] if start else None
        inside = tokens[start * SIZE : stop * SIZE]
        return Stored(hashes[start:stop], parent, inside, SIZE, "gpu", None, 0, True, request.tip)

    def reset(self) -> list[Event]:
        self.cached.clear()
        self.free = [0] * self.gpu_blocks
        return [Cleared()]


class Listener:
    """A subscriber that sees only the transitions, and trusts them."""

    def __init__(self) -> None:
        self.held: dict[str, Resident] = {}

    def hear(self, transitions: Sequence[Transition]) -> None:
        for each in transitions:
            match each:
                case Resident(key):
                    assert self.held.get(key) != each, "said twice"
                    self.held[key] = each
                case Evicted(key):
                    del self.held[key]
                case _:
                    self.held.clear()


class Watch:
    """An engine, its residency, and the chains whose sessions its events named."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.residency = Residency()
        self.listener = Listener()
        self.chains: dict[str, Request] = {}
        self.told: set[str] = set()
        self.measured: set[str] = set()
        self.overheard: set[str] = set()
        """Sessions that were named before they were bound. Only the measurement of the prompt tells whether the last
        blocks belong to the prompt or to its answer."""

    def serve(self, request: Request, is_exact: bool) -> None:
        """Runs a request. If its estimate `is_exact`, the reported residents must be right at every step."""
        hear = self.listener.hear
        on_its_way = None if request.tip in self.measured else request
        if request.is_bound != "before" and not self.residency.is_bound(request.tip):
            self.overheard.add(request.tip)
        if request.is_bound == "before":
            hear(self.residency.bind(request.binding()))
            self.chains[request.tip] = request
        is_named = False
        for batch in self.engine.steps(request):
            hear(self.residency.apply(batch))
            is_named = True
            if self.residency.is_bound(request.tip):
                self.told.add(request.tip)
            if is_exact and request.tip not in self.overheard:
                self.check(on_its_way)
            self.check_tip(request)
        if request.is_bound == "after":
            hear(self.residency.bind(request.binding()))
            self.chains[request.tip] = request
            self.check_tip(request)
        if is_named and self.residency.is_bound(request.tip):
            self.told.add(request.tip)
        self.measure(request)
        self.check()

    def measure(self, request: Request) -> None:
        if self.residency.is_bound(request.tip):
            self.measured.add(request.tip)
        self.listener.hear(self.residency.measure(request.tip, len(request.prompt)))

    def serve_late(self, request: Request) -> None:
        """Runs a request on an engine whose past is unknown."""
        if request.is_bound != "never":
            self.listener.hear(self.residency.bind(request.binding()))
            self.chains[request.tip] = request
        elif not self.residency.is_bound(request.tip):
            self.overheard.add(request.tip)
        on_its_way = None if request.tip in self.measured else request
        for batch in self.engine.steps(request):
            self.listener.hear(self.residency.apply(batch))
            if request.tip not in self.overheard:
                self.check(on_its_way, is_complete=False)
        self.measure(request)
        self.check(is_complete=False)

    def clear(self) -> None:
        self.listener.hear(self.residency.apply(self.engine.reset()))
        self.told.clear()
        self.check()

    def check_tip(self, request: Request) -> None:
        """A prompt never has more reported blocks than real ones, if its estimate is at most twice its length. But an
        answer that nobody heard of may have filled its last block."""
        said = {resident.key: resident.tokens for resident in self.residency.residents()}
        if request.estimate_tokens <= 2 * len(request.prompt) and request.tip not in self.overheard:
            assert said.get(request.tip, 0) // SIZE <= len(request.prompt) // SIZE

    def check(self, on_its_way: Request | None = None, is_complete: bool = True) -> None:
        """Each reported resident is in the cache. If events named a chain's blocks, each of its cached keys is
        reported. For a prompt that is not measured yet, the reported end of a key may be an earlier block."""
        said = {resident.key: resident for resident in self.residency.residents()}
        assert said == self.listener.held
        assert len(said) == len(self.residency)
        unsure = {key_of(on_its_way.prompt[:end]) for end in on_its_way.ends()} if on_its_way else set()
        for tip, request in self.chains.items():
            for end in request.ends():
                prefix = request.prompt[:end]
                key, blocks = key_of(prefix), [block_hash(prefix[:at]) for at in range(SIZE, end + 1, SIZE)]
                found = said.get(key)
                if found is not None:
                    assert found.tokens // SIZE == blocks.index(found.block_hash) + 1
                    assert found.medium == self.engine.medium_of(found.block_hash)
                    assert key in unsure or found.block_hash == blocks[-1]
                elif is_complete and tip in self.told and key not in unsure and blocks:
                    held = self.engine.medium_of(blocks[-1])
                    assert not held, f"{end} tokens of {request.prompt} are held, but not said to be"


@st.composite
def any_request(draw: st.DrawFn, is_exact: bool, reports: bool = False) -> Request:
    """Prompts of a few segments, so that many share a beginning. A longer prompt may continue with another's answer."""
    segments = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=5))
    prompt = [letter for letter, length in segments for _ in range(length)]
    is_bound = draw(st.sampled_from(["before", "before", "after", "never"]))
    return Request(
        prompt=prompt,
        answer=[draw(st.integers(0, 1))] * draw(st.integers(0, 10)),
        chunk_blocks=draw(st.integers(1, 4)),
        is_bound=is_bound,
        estimate_tokens=len(prompt) if is_exact else draw(st.integers(1, 80)),
        is_report=reports and is_bound != "never" and draw(st.booleans()),
    )


LIFE = partial(st.lists, min_size=1, max_size=25)
GPU_BLOCKS = st.integers(16, 40)
"""A prompt of 45 tokens and its answer of 10 take 13 blocks."""


@given(LIFE(st.one_of(any_request(is_exact=True), st.just(None))), GPU_BLOCKS, st.sampled_from([0, 5, 60]))
@settings(max_examples=150)
def test_with_right_estimates_what_is_said_is_what_is_held_after_every_batch(
    requests: list[Request | None], gpu_blocks: int, cpu_blocks: int
) -> None:
    watch = Watch(Engine(gpu_blocks, cpu_blocks))
    for request in requests:
        if request is None:
            watch.clear()
        else:
            watch.serve(request, is_exact=True)


@given(LIFE(any_request(is_exact=False)), GPU_BLOCKS)
@settings(max_examples=150)
def test_with_any_estimate_what_is_said_is_what_is_held_once_the_prompt_is_measured(
    requests: list[Request], gpu_blocks: int
) -> None:
    watch = Watch(Engine(gpu_blocks))
    for request in requests:
        watch.serve(request, is_exact=False)


@given(LIFE(any_request(is_exact=True)), LIFE(any_request(is_exact=True, reports=True)), GPU_BLOCKS)
@settings(max_examples=150)
def test_who_comes_late_never_says_what_is_not_held(
    unseen: list[Request], requests: list[Request], gpu_blocks: int
) -> None:
    engine = Engine(gpu_blocks)
    for request in unseen:
        for _ in engine.steps(request):
            pass
    watch = Watch(engine)
    watch.residency.capacity_tokens = gpu_blocks * SIZE
    watch.residency.relearn()
    for request in requests:
        watch.serve_late(request)
