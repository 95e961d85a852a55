"""Finds where in an engine's blocks each prefix key ends. Pure.

A gateway knows keys by bytes and images; an engine knows blocks by tokens. The session id, which the engine echoes,
binds a request's chain to its blocks. Then three kinds of places are exact: the start; the beginning and end of every
image (its placeholders are in the events); the end of the prompt (the engine's usage tells its length). Between two
exact places, a key's place in tokens follows from its place in bytes, in proportion. A key counts for the blocks that
end at or before it. If a place is not known, the agent assumes one that is certainly not too early. So a key that it
calls resident is certainly resident.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.agent.blocks import MediaSpan
from coordinator.agent.token_sizes import TokenPlaces

_MAX_BINDINGS = 8192
_MAX_PATH_BLOCKS = 1_000_000
"""In the paths of all bindings together."""


@dataclass(slots=True)
class Binding:
    """A request's chain, as its gateway wrote it down. `text_bytes` and `image_counts` are the text and the images from
    the prompt's start to each key's end. `prompt_tokens` is an estimate until the engine has told it (`is_measured`).
    """

    tip: str
    keys: Sequence[str]
    text_bytes: Sequence[int]
    image_counts: Sequence[int]
    prompt_tokens: int
    is_report: bool = False
    """Whether the engine was asked to report blocks that it reused."""
    is_measured: bool = False
    path: list[int] = field(default_factory=list)
    """The prompt's blocks as far as events have named them; 0 for a block that is not known."""
    sure_blocks: int = 0
    """How many blocks of `path` certainly have only tokens of the prompt, even if the estimate is wrong. An answer
    fills its blocks one at a time; its first block also has the prompt's end."""
    spans: list[MediaSpan] = field(default_factory=list)
    """The media along `path`."""
    last: int = 0
    """The deepest block that the session's events have named."""
    expected: list[str] = field(default_factory=list)
    """The keys that end within `path`."""

    def is_complete(self, block_size: int) -> bool:
        """Whether the path reaches the prompt's end, as far as its length is known."""
        return bool(self.path) and self.prompt_tokens - len(self.path) * block_size < block_size


class Bindings:
    """The chains that are bound, by tip. The least recently used are dropped first."""

    def __init__(self) -> None:
        self._by_tip: OrderedDict[str, Binding] = OrderedDict()
        self._path_blocks = 0

    def __contains__(self, tip: str) -> bool:
        return tip in self._by_tip

    def get(self, tip: str) -> Binding | None:
        return self._by_tip.get(tip)

    def put(self, binding: Binding) -> None:
        """Add a binding. It takes over what an earlier binding of the same tip knew."""
        known = self._by_tip.pop(binding.tip, None)
        if known is not None:
            binding.path, binding.spans, binding.sure_blocks = known.path, known.spans, known.sure_blocks
            binding.last, binding.expected = known.last, known.expected
            if known.is_measured:
                binding.prompt_tokens, binding.is_measured = known.prompt_tokens, True
        self._by_tip[binding.tip] = binding
        self._trim()

    def set_path(self, binding: Binding, path: list[int], spans: list[MediaSpan]) -> None:
        """Set the blocks of a binding, and the media along them."""
        self._path_blocks += len(path) - len(binding.path)
        binding.path, binding.spans = path, spans
        self._by_tip.move_to_end(binding.tip)
        self._trim()

    def forget_paths(self) -> None:
        """Keep the chains, and forget their blocks."""
        for binding in self._by_tip.values():
            binding.path, binding.spans, binding.expected, binding.last, binding.sure_blocks = [], [], [], 0, 0
        self._path_blocks = 0

    def _trim(self) -> None:
        by_tip = self._by_tip
        while len(by_tip) > _MAX_BINDINGS or (self._path_blocks > _MAX_PATH_BLOCKS and len(by_tip) > 1):
            _, oldest = by_tip.popitem(last=False)
            self._path_blocks -= len(oldest.path)


@dataclass(frozen=True, slots=True)
class KeyEnd:
    """The end of a key, in tokens from the prompt's start. `span_tokens` is the distance to the key before it."""

    key: str
    tokens: int
    span_tokens: int
    is_exact: bool
    """Whether the engine told the place; otherwise it follows from bytes."""


def prompt_end(binding: Binding, known_tokens: int, block_size: int) -> int:
    """The prompt's length in tokens. Until it is measured, this is the estimate; or the tokens that the events have
    named, if those are more than one block longer. One block more may be the answer's."""
    if binding.is_measured or known_tokens <= binding.prompt_tokens + block_size:
        return binding.prompt_tokens
    return known_tokens


def places(
    binding: Binding,
    spans: Sequence[MediaSpan],
    end_tokens: int,
    exact: Mapping[str, int],
    token_places: TokenPlaces,
) -> list[KeyEnd]:
    """The end of each key of a chain, shallow to deep. `exact` has the ends of keys that other chains have measured."""
    found: list[KeyEnd] = []
    text_bytes, behind, first = 0, 0, 0
    for anchor in _anchors(binding, spans, end_tokens, exact):
        reach_bytes = binding.text_bytes[anchor.index] - text_bytes
        start_tokens, left_tokens = max(anchor.start, behind), behind
        for index in range(first, anchor.index):
            share_bytes = binding.text_bytes[index] - text_bytes
            tokens = start_tokens
            if reach_bytes:
                tokens = token_places.between(left_tokens, start_tokens, share_bytes, reach_bytes)
            tokens = max(tokens, behind)
            found.append(KeyEnd(binding.keys[index], tokens, tokens - behind, is_exact=False))
            behind = tokens
        tokens = max(anchor.end, behind)
        found.append(KeyEnd(binding.keys[anchor.index], tokens, tokens - behind, anchor.is_exact))
        text_bytes, behind, first = binding.text_bytes[anchor.index], tokens, anchor.index + 1
    return found


def sure_places(binding: Binding, found: list[KeyEnd], block_size: int) -> list[KeyEnd]:
    """The places that surely have no token of an answer, however wrong the estimate is. Until a prompt is measured,
    only its sure blocks count. If its answer may have begun, the tip ends in the last sure block."""
    if binding.is_measured:
        return found
    sure, (*before, tip) = binding.sure_blocks, found
    kept = [place for place in before if place.tokens // block_size <= sure]
    blocks = tip.tokens // block_size
    if 0 < blocks <= sure or 0 < sure < len(binding.path):
        tokens = min(blocks, sure) * block_size
        kept.append(replace(tip, tokens=tokens, span_tokens=max(0, tip.span_tokens - (tip.tokens - tokens))))
    return kept


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A place that is known without its bytes. The key at `index` ends with an image or text from token `start` to
    token `end`. The two differ for an image, which has tokens but no bytes of text."""

    index: int
    start: int
    end: int
    is_exact: bool


def _anchors(
    binding: Binding, spans: Sequence[MediaSpan], end_tokens: int, exact: Mapping[str, int]
) -> Iterator[_Anchor]:
    images, behind = 0, 0
    tip = len(binding.keys) - 1
    for index, (key, count) in enumerate(zip(binding.keys, binding.image_counts, strict=True)):
        anchor = None
        if index == tip:
            start = spans[images].start if images < count <= len(spans) else end_tokens
            anchor = _Anchor(index, min(start, end_tokens), end_tokens, binding.is_measured)
        elif images < count <= len(spans):  # the first key with another image ends with its last image
            start, end = spans[images].start, spans[count - 1].end
            anchor = _Anchor(index, min(start, end_tokens), min(end, end_tokens), count == images + 1)
        elif behind <= exact.get(key, -1) <= end_tokens:
            anchor = _Anchor(index, exact[key], exact[key], is_exact=True)
        elif count > len(spans):  # the place of the image is not known; it is not after the prompt's end
            anchor = _Anchor(index, end_tokens, end_tokens, is_exact=False)
        if anchor is not None:
            behind = anchor.end
            yield anchor
        images = count
