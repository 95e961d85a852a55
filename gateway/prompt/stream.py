"""The prompt stream: the canonical bytes of a prompt, hashed as they are written.

The stream is a sequence of tokens. Each token is `0xFF`, a tag byte, and the data of its tag:

- a *text* tag ends the raw UTF-8 written since the token before it (0xFF cannot occur in UTF-8);
- a *field* tag is followed by values, each preceded by its length (4 bytes, little-endian);
- a *media* tag is followed by a 32-byte digest (`MEDIA` has one value, its kind, before the digest);
- `TOKENS` is followed by 4-byte little-endian token ids, ended by `TOKENS_END`.

Only short values have a length, and they are complete when they are written. A length before a text would change every
key inside that text when the text grows. So no byte depends on later ones, and a stream can be read back in one way
only. `docs/adr/0001-prompt-stream.md` has the table of tags and the order in which a request is written.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from blake3 import blake3

from gateway.prompt.prompt import ImageSize

FORMAT_VERSION: Final = b"1"

# Text tags: the meaning of the raw UTF-8 before them.
TEXT: Final = b"\xff\x01"  # content of a message, or a completion's prompt
REASONING: Final = b"\xff\x02"  # an assistant's reasoning
TOOL: Final = b"\xff\x03"  # JSON of one tool definition
ARGUMENTS: Final = b"\xff\x04"  # JSON of a tool call's arguments
PART: Final = b"\xff\x05"  # JSON of a content part of unknown type

# Field tags: length-prefixed values follow.
VERSION: Final = b"\xff\x10"
KIND: Final = b"\xff\x11"
MODEL: Final = b"\xff\x12"
ADAPTER: Final = b"\xff\x13"
CACHE_SALT: Final = b"\xff\x14"
OPTION: Final = b"\xff\x15"  # name, JSON: a request parameter of the whole prompt
MESSAGE: Final = b"\xff\x20"  # role
NAME: Final = b"\xff\x21"
CALL_ID: Final = b"\xff\x22"  # `tool_call_id` of a tool's message, `id` of a tool call
CALL: Final = b"\xff\x23"  # function name: a tool call, up to its ARGUMENTS
CALL_FIELD: Final = b"\xff\x24"  # key, JSON: any other field of a tool call
PART_FIELD: Final = b"\xff\x25"  # key, JSON: any other field of the text part before it
FIELD: Final = b"\xff\x26"  # key, JSON: any other field of a message
MESSAGE_END: Final = b"\xff\x2f"  # no value

# Media tags: a 32-byte digest follows.
IMAGE: Final = b"\xff\x30"  # of an image's bytes
IMAGE_URL: Final = b"\xff\x31"  # of an image's http(s) URL
MEDIA: Final = b"\xff\x32"  # kind, then the digest of any other medium

TOKENS: Final = b"\xff\x40"
TOKENS_END: Final = b"\xff\xff\xff\xff"  # 2^32 - 1 is no token id

# The text grid. After p bytes of text, the next boundary follows
# max(GRID_BASE_BYTES, 2^(floor(log2 p) - GRID_SHIFT)) bytes later. ADR 1 says why.
GRID_BASE_BYTES: Final = 256
GRID_SHIFT: Final = 3

MAX_KEYS: Final = 128

_KEY_BYTES: Final = 16
_FIXED: Final = 0  # the index of a boundary that is not on the grid: after a message, after an image, or the tip
_COPY_LIMIT_BYTES: Final = 2048  # a longer text is hashed directly, shorter ones are collected first


def grid(size_bytes: int) -> list[int]:
    """Text offsets of the grid's boundaries in a text of `size_bytes`."""
    offsets, offset = [], GRID_BASE_BYTES
    while offset <= size_bytes:
        offsets.append(offset)
        offset += max(GRID_BASE_BYTES, 1 << (offset.bit_length() - 1 - GRID_SHIFT))
    return offsets


_GRID: Final = grid(1 << 40)  # more text than any body holds


class PromptStream:
    """Writes one prompt stream and collects its keys; `finish` ends the chain.

    `keys`, `text_bytes` and `image_counts` are parallel, shallow to deep.
    """

    __slots__ = (
        "_grid_index",
        "_grid_indexes",
        "_hasher",
        "_pending",
        "_text_bytes",
        "_unkeyed",
        "image_counts",
        "images",
        "keys",
        "text_bytes",
    )

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.text_bytes: list[int] = []
        self.image_counts: list[int] = []
        self.images: list[ImageSize | None] = []
        self._hasher = blake3()
        self._pending = bytearray()  # written, but not hashed yet
        self._unkeyed = False  # whether bytes were hashed after the last boundary
        self._text_bytes = 0
        self._grid_index = 1  # the index of the next boundary on the grid
        self._grid_indexes: list[int] = []  # parallel to keys; _FIXED if not on the grid

    def text(self, data: bytes, tag: bytes) -> None:
        """Raw bytes without 0xFF, ended by a text tag. Grid boundaries fall inside."""
        self._raw(data)
        self._pending += tag

    def token_ids(self, data: bytes) -> None:
        """4-byte little-endian token ids. Grid boundaries count bytes, so they may split an id."""
        self._pending += TOKENS
        self._raw(data)
        self._pending += TOKENS_END

    def field(self, tag: bytes, *values: bytes) -> None:
        """A field tag with its values, each preceded by its length."""
        pending = self._pending
        pending += tag
        for value in values:
            pending += len(value).to_bytes(4, "little")
            pending += value

    def framed(self, frame: bytes) -> None:
        """A token that `frame` has encoded, or a tag that has no value."""
        self._pending += frame

    def image(self, tag: bytes, digest: bytes, size: ImageSize | None) -> None:
        """An image as its 32-byte digest, then a boundary."""
        self._pending += tag
        self._pending += digest
        self.images.append(size)
        self.boundary()

    def media(self, kind: bytes, digest: bytes) -> None:
        """Any other medium as its kind and 32-byte digest, then a boundary. Its size is unknown."""
        self.field(MEDIA, kind)
        self._pending += digest
        self.images.append(None)
        self.boundary()

    def boundary(self) -> None:
        """End a key here, unless one ends here already."""
        self._flush()
        if self._unkeyed:
            self.keys.append(self._hasher.hexdigest(length=_KEY_BYTES))
            self.text_bytes.append(self._text_bytes)
            self.image_counts.append(len(self.images))
            self._grid_indexes.append(_FIXED)
            self._unkeyed = False

    def key_here(self) -> str:
        """The key that ends here; empty if none does."""
        return self.keys[-1] if self.keys and not self._pending and not self._unkeyed else ""

    def digest(self) -> bytes:
        """A 16-byte digest of everything written so far."""
        self._flush()
        return self._hasher.digest(length=_KEY_BYTES)

    def finish(self) -> None:
        """End the last key (the tip), and limit the chain to MAX_KEYS.

        Grid boundaries are thinned first: those stay whose grid index is divisible by 2, then by 4 and so on, so that
        chains of different length still share keys. If that is not enough, the shallowest of all keys go.
        """
        self.boundary()
        if len(self.keys) <= MAX_KEYS:
            return
        indexes = self._grid_indexes
        stride = 2
        while sum(index % stride == 0 for index in indexes) > MAX_KEYS and stride <= self._grid_index:
            stride *= 2
        kept = [place for place, index in enumerate(indexes) if index % stride == 0][-MAX_KEYS:]
        self.keys = [self.keys[place] for place in kept]
        self.text_bytes = [self.text_bytes[place] for place in kept]
        self.image_counts = [self.image_counts[place] for place in kept]
        self._grid_indexes = [indexes[place] for place in kept]

    def _raw(self, data: bytes) -> None:
        start = 0
        end_bytes = self._text_bytes + len(data)
        if end_bytes >= _GRID[self._grid_index - 1]:
            start = self._raw_to_last_grid_boundary(memoryview(data))
        if len(data) - start <= _COPY_LIMIT_BYTES:
            self._pending += data[start:] if start else data
        else:
            self._flush()
            self._hasher.update(memoryview(data)[start:])
            self._unkeyed = True
        self._text_bytes = end_bytes

    def _raw_to_last_grid_boundary(self, data: memoryview) -> int:
        """Write `data` up to the last grid boundary in it. Returns the number of bytes written."""
        self._flush()
        update, digest, add_key = self._hasher.update, self._hasher.hexdigest, self.keys.append
        before_bytes, first = self._text_bytes, self._grid_index - 1
        offsets = _GRID[first : bisect_right(_GRID, before_bytes + len(data), first)]
        start = 0
        for offset in offsets:
            stop = offset - before_bytes
            update(data[start:stop])
            add_key(digest(length=_KEY_BYTES))
            start = stop
        self.text_bytes += offsets
        self.image_counts += [len(self.images)] * len(offsets)
        self._grid_indexes += range(self._grid_index, self._grid_index + len(offsets))
        self._grid_index += len(offsets)
        self._unkeyed = False
        return start

    def _flush(self) -> None:
        if self._pending:
            self._hasher.update(self._pending)
            self._pending.clear()
            self._unkeyed = True


def frame(tag: bytes, *values: bytes) -> bytes:
    """The bytes of a field token, for tokens that are written often (`PromptStream.framed`)."""
    return tag + b"".join(len(value).to_bytes(4, "little") + value for value in values)
