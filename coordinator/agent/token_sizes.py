"""Learns how many bytes of text each token stands for, to turn a place in a prompt's bytes into a place in its tokens.

Prose, code and other scripts differ by a factor of four in bytes per token. With an average size for all tokens, a
key's place would be wrong by several blocks. The engine's detokenizer tells the text of each token, once.
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
"""The bytes of the tokens whose size is known, and the other tokens."""
Detokenize = Callable[[Sequence[int]], Awaitable[str | None]]
"""The text of a sequence of tokens; None if the engine does not tell."""
_MAX_FAILURES = 5
"""After this many failures in a row, the engine counts as having no such endpoint."""


class TokenSizes:
    """Sizes in UTF-8 bytes, by token id."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._wanted: dict[int, None] = {}
        self._separator: tuple[int, str] | None = None
        self._is_available = True
        self._failures = 0

    def measure(self, tokens: Sequence[int]) -> Weight:
        """The weight of tokens. Tokens of unknown size are noted, for `learn`."""
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
        """A weight in bytes, with the sizes learned since. A size that is still unknown is guessed."""
        known, others = weight
        return known + sum(self._bytes.get(token, _UNKNOWN_BYTES) for token in others) if others else known

    async def learn(self, detokenize: Detokenize) -> None:
        """Ask the engine for a batch of unknown sizes."""
        if not self._wanted:
            return
        batch = list(self._wanted)[:_BATCH]
        if self._separator is not None or await self._find_separator(batch, detokenize):
            await self._size([token for token in batch if token in self._wanted], detokenize)
        if self._failures >= _MAX_FAILURES:
            self._is_available = False
            self._wanted.clear()

    async def _find_separator(self, batch: Sequence[int], detokenize: Detokenize) -> bool:
        """Find a token with a distinct text, to put between others."""
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
        """Learn a batch in one call. If a token's text contains the separator's, split the batch."""
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


class TokenPlaces:
    """Turns places in a prompt's text into places in its tokens."""

    def __init__(self, text_bytes: Sequence[int], block_size: int) -> None:
        self._behind = [0, *accumulate(text_bytes)]
        self._block_size = block_size

    def between(self, left_tokens: int, right_tokens: int, part_bytes: int, whole_bytes: int) -> int:
        """The token between two others before which `part_bytes` of their `whole_bytes` lie. Rounded down."""
        left, right = self._bytes_at(left_tokens), self._bytes_at(right_tokens)
        if right <= left:
            return left_tokens + part_bytes * (right_tokens - left_tokens) // whole_bytes
        wanted = left + (right - left) * part_bytes / whole_bytes
        return min(max(left_tokens, self._token_at(wanted)), right_tokens)

    def _bytes_at(self, tokens: int) -> float:
        block, rest = divmod(tokens, self._block_size)
        last = len(self._behind) - 1
        if block >= last:  # past the known blocks, the average goes on
            return self._behind[last] * tokens / max(1, last * self._block_size)
        return self._behind[block] + (self._behind[block + 1] - self._behind[block]) * rest / self._block_size

    def _token_at(self, size: float) -> int:
        last = len(self._behind) - 1
        if size >= self._behind[last]:
            return int(size * last * self._block_size / max(1, self._behind[last]))
        block = bisect_right(self._behind, size) - 1
        width = self._behind[block + 1] - self._behind[block]
        return block * self._block_size + int((size - self._behind[block]) * self._block_size / max(1, width))
