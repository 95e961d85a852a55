"""Engines before vLLM 0.30: their events name no sessions, so a prompt's blocks are found by its token ids. Pure.

The agent of such an engine has the mode `token_ids`. Gateways then ask the engine for the token ids of prompts, and
hand them to the agent together with the measured lengths (coordinator/pool/engine_feedback.py).

To drop support for these engines, delete this module and late_prompts.py, the lines in this package that name them,
`Residency.token_ids`, `Residency.lacks`, `Measured.token_ids` and `Binding.image_ids`; and what
gateway/relay/token_ids.py lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coordinator.agent.blocks import MEDIA, BlockTable
from coordinator.agent.kv_events import Stored

MODE = "token_ids"
"""The agent's mode while its engine needs this."""
_SESSIONS_SINCE = (0, 30)
"""The first version of vLLM whose events name sessions."""
_MAX_TOKEN_ID = 2**32 - 1

_Content = tuple[int | None, tuple[int, ...]]
"""A block's parent and its tokens."""


class TokenIdMatcher:
    """Finds the blocks of a prompt in a table, by the prompt's token ids."""

    def __init__(self, table: BlockTable) -> None:
        self.is_needed = True
        """Whether the engine's events name no sessions, as far as it is known."""
        self._table = table
        self._contents: dict[int, _Content] = {}
        self._by_content: dict[_Content, dict[int, None]] = {}

    def expect(self, version: tuple[int, ...]) -> None:
        """The engine's version; empty if it does not tell."""
        if version:
            self.is_needed = version < _SESSIONS_SINCE

    def store(self, event: Stored) -> None:
        """Note the tokens of blocks that the table has just added."""
        if event.session:
            self.is_needed = False
        size = self._table.block_size
        if (
            not self.is_needed
            or not size
            or not event.is_prefix
            or event.medium not in MEDIA
            or event.block_size != size
        ):
            return
        parent = event.parent
        for index, block_hash in enumerate(event.hashes):
            tokens = tuple(event.tokens[index * size : (index + 1) * size])
            if len(tokens) == size and block_hash not in self._contents:
                self._contents[block_hash] = content = (parent, tokens)
                self._by_content.setdefault(content, {})[block_hash] = None
            parent = block_hash

    def remove(self, hashes: Iterable[int]) -> None:
        """Forget those of the blocks that the table holds no more."""
        for block_hash in hashes:
            if block_hash in self._contents and block_hash not in self._table:
                content = self._contents.pop(block_hash)
                same = self._by_content[content]
                del same[block_hash]
                if not same:
                    del self._by_content[content]

    def clear(self) -> None:
        self._contents.clear()
        self._by_content.clear()

    def find(self, token_ids: Sequence[int], image_ids: Sequence[str]) -> list[int]:
        """The blocks that hold a prompt, as far as they are held. Images of one size have the same placeholders: of
        blocks that differ only in their images, the block whose images are in `image_ids` is taken, else the last
        stored."""
        path: list[int] = []
        parent, size = None, self._table.block_size
        for start in range(0, len(token_ids) - size + 1, size) if size else ():
            held = self._by_content.get((parent, tuple(token_ids[start : start + size])))
            if not held:
                break
            parent = next((each for each in held if self._has_only(each, image_ids)), next(reversed(held)))
            path.append(parent)
        return path

    def _has_only(self, block_hash: int, image_ids: Sequence[str]) -> bool:
        return all(span.identifier in image_ids for span in self._table.media_spans([block_hash]))


def read_token_ids(record: Mapping[str, Any]) -> tuple[int, ...]:
    """The token ids in the record of a measured prompt, if there are any. Raises ValueError, TypeError and
    OverflowError if no gateway wrote the record."""
    token_ids = tuple(int(each) for each in record.get("token_ids") or ())
    if not all(0 <= each <= _MAX_TOKEN_ID for each in token_ids):
        raise ValueError("not a token id")
    return token_ids
