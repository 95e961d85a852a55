"""How many bytes of text each token stands for: between two known points a key lies where its bytes do.

Prose, code and other scripts differ by a factor of four in bytes per token, so a key's place would be off by several
blocks if tokens were taken to be equal. The engine's own detokenizer tells what each one is; it is asked once a token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate

_UNKNOWN_BYTES = 4
_BATCH = 2048
_MIN_BATCH = 4
_MAX_TOKENS = 500_000
"""More than any vocabulary has."""

Weight = tuple[int, tuple[int, ...]]
"""Bytes of the tokens whose size is known, and the others."""
Detokenize = Callable[[Sequence[int]], Awaitable[str | None]]
"""The text of a sequence of tokens; None where the engine cannot tell."""
_MAX_FAILURES = 5
"""In a row; then it has no such endpoint."""


class TokenSizes:
    """Sizes in UTF-8 bytes, by token id."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._wanted: dict[int, None] = {}
        self._separator: tuple[int, str] | None = None
        self._is_available = True
        self._failures = 0

    def measure(self, tokens: Sequence[int]) -> Weight:
        """What tokens weigh; those of unknown size will be asked for."""
        known = self._bytes
        try:
            return sum(map(known.__getitem__, tokens)), ()
        except KeyError:
            total, unknown = 0, []
        for token in tokens:
            size = known.get(token)
            if size is None:
                unknown.append(token)
            else:
                total += size
        if unknown and self._is_available and len(self._bytes) + len(self._wanted) < _MAX_TOKENS:
            self._wanted.update(dict.fromkeys(unknown))
        return total, tuple(unknown)

    def total(self, weight: Weight) -> int:
        """In bytes, with what was learned since; what still is not known at a guess."""
        known, others = weight
        return known + sum(self._bytes.get(token, _UNKNOWN_BYTES) for token in others) if others else known

    async def learn(self, detokenize: Detokenize) -> None:
        """Ask for a batch of what is wanted."""
        if not self._wanted:
            return
        batch = list(self._wanted)[:_BATCH]
        if self._separator is not None or await self._find_separator(batch, detokenize):
            await self._size([token for token in batch if token in self._wanted], detokenize)
        if self._failures >= _MAX_FAILURES:
            self._is_available = False
            self._wanted.clear()

    async def _find_separator(self, batch: Sequence[int], detokenize: Detokenize) -> bool:
        """A token with a text of its own, to be put between others."""
        for token in batch[:32]:
            text = await self._text([token], detokenize)
            if text is None:
                return False
            self._know(token, text)
            if text.isascii() and text.isalpha() and len(text) > 2:
                self._separator = (token, text)
                return True
        return False

    async def _size(self, batch: Sequence[int], detokenize: Detokenize) -> None:
        """Size a batch in one call; halve it where a token's text looks like the separator's."""
        assert self._separator is not None
        token, mark = self._separator
        if not batch:
            return
        asked = [token]
        for each in batch:
            asked += (each, token)
        text = await self._text(asked, detokenize)
        if text is None:
            return
        pieces = text.removeprefix(mark).removesuffix(mark).split(mark)
        if len(pieces) != len(batch) and 1 < len(batch) <= _MIN_BATCH:
            for each in batch:  # not worth a call for each
                self._know(each, " " * _UNKNOWN_BYTES)
            return
        if len(batch) > 1 and len(pieces) != len(batch):
            await self._size(batch[: len(batch) // 2], detokenize)
            await self._size(batch[len(batch) // 2 :], detokenize)
            return
        for each, piece in zip(batch, pieces if len(batch) > 1 else [mark.join(pieces)], strict=True):
            self._know(each, piece)

    async def _text(self, tokens: Sequence[int], detokenize: Detokenize) -> str | None:
        text = await detokenize(tokens)
        self._failures = self._failures + 1 if text is None else 0
        return text

    def _know(self, token: int, text: str) -> None:
        # A part of a character shows as U+FFFD, which is longer than the part.
        self._bytes[token] = len(text.encode()) - 2 * text.count("\ufffd")
        self._wanted.pop(token, None)


class Ruler:
    """Where in a prompt's tokens a share of its text lies."""

    def __init__(self, text_bytes: Sequence[int], block_size: int) -> None:
        self._behind = [0, *accumulate(text_bytes)]
        self._block_size = block_size

    def between(self, left_tokens: int, right_tokens: int, part_bytes: int, whole_bytes: int) -> int:
        """The token at which `part_bytes` of the `whole_bytes` between two tokens are behind. Rounded down."""
        left, right = self._bytes_at(left_tokens), self._bytes_at(right_tokens)
        if right <= left:
            return left_tokens + part_bytes * (right_tokens - left_tokens) // whole_bytes
        wanted = left + (right - left) * part_bytes / whole_bytes
        return min(max(left_tokens, self._token_at(wanted)), right_tokens)

    def _bytes_at(self, tokens: int) -> float:
        block, rest = divmod(tokens, self._block_size)
        last = len(self._behind) - 1
        if block >= last:  # behind what is known it goes on as it was on average
            return self._behind[last] * tokens / max(1, last * self._block_size)
        return self._behind[block] + (self._behind[block + 1] - self._behind[block]) * rest / self._block_size

    def _token_at(self, size: float) -> int:
        last = len(self._behind) - 1
        if size >= self._behind[last]:
            return int(size * last * self._block_size / max(1, self._behind[last]))
        block = bisect_right(self._behind, size) - 1
        width = self._behind[block + 1] - self._behind[block]
        return block * self._block_size + int((size - self._behind[block]) * self._block_size / max(1, width))


EVEN = Ruler((), 1)
"""Takes all tokens for equal."""
