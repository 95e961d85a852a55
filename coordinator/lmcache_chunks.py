"""Computes the names under which LMCache's server (0.5.6) keeps a prompt's KV in Redis, from the prompt's tokens.

LMCache keeps KV in chunks of a fixed number of tokens. It keeps full chunks only, each under a name:

    [<prefix>@]<model>@<KV rank, 8 hex>@<object group>@<64 hex>[@<cache salt>]

The 64 hex digits are a BLAKE3 of the chunk before (32 bytes) and of the chunk's tokens (4 bytes each, big-endian). So a
name stands for the whole prompt up to its chunk's end. vLLM's placeholders are the same for every image; LMCache first
replaces them by values drawn from the image's identifier (vLLM's `mm_hash`, or the request's uuid). Names do not have
the LoRA adapter.

Everything here is a pure function of its arguments. `NAME` matches the keys that LMCache writes, by its server or in
process, and no others.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from blake3 import blake3

# As 0.3.7 to 0.5.6 write them:
#   server      [prefix@]model@kv_rank@group@hash[@salt]                       kvchunk@Qwen/Qwen2.5-7B@01000100@0@7e3e…
#   in process  model@world_size@worker@hash@dtype[@layer][@tag%value …]       Qwen/Qwen2.5-7B@1@0@-3f2a@bfloat16
# redis:// writes an in-process chunk as two keys, which end with kv_bytes and metadata.
NAME = re.compile(
    r"(?P<head>[^@].*?)@(?:"
    r"(?P<kv_rank>[0-9a-f]{8})@[0-9a-f]{1,8}@[0-9a-f]{16,128}(?:@.*)?"
    r"|(?P<world_size>\d+)@\d+@-?[0-9a-f]{1,64}"
    r"@(?P<dtype>half|b?float(?:16|32|64)?|double|u?int\d+|bool|fp8_\w+?)(?:@.*?)?(?P<half>kv_bytes|metadata)?"
    r")",
    re.DOTALL,
)
"""The name of any chunk. `head` is the model, after the prefix if a server wrote the chunk."""
TOKEN_BYTES = 4
_VALUE_BITS = 31
_VALUES_PER_DIGEST = 8


START = blake3(bytes(8 + TOKEN_BYTES)).digest()
"""The parent of a first chunk: the hash of a 0 in 8 bytes and the token 0."""


class ImageSpan(NamedTuple):
    """The placeholders of an image among some tokens of a prompt."""

    identifier: str
    start: int
    """The index of its first placeholder; negative if the image began before these tokens."""
    length: int


@dataclass(frozen=True, slots=True)
class ChunkTier:
    """How the LMCache server beside an engine keeps its KV in Redis. Raises ValueError if its chunks have no names."""

    prefix: str
    model: str
    """The argument of `vllm serve`."""
    chunk_tokens: int
    world_size: int = 1
    ttl_s: int = 0

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if "@" in self.prefix + self.model:
            raise ValueError(f"LMCache has no names for an @ in a prefix or model: {self.prefix!r}, {self.model!r}")

    def hashes(self, tokens: Sequence[int], after: bytes = START) -> list[bytes]:
        """Those of the chunks that these tokens fill, behind a chunk with the hash `after`.

        Raises OverflowError for an id of more than 32 bits.
        """
        data, width, found = _big_endian(tokens), self.chunk_tokens * TOKEN_BYTES, list[bytes]()
        for at in range(0, len(data) - len(data) % width, width):
            after = blake3(after + data[at : at + width]).digest()
            found.append(after)
        return found

    def name(self, chunk_hash: bytes, cache_salt: str = "") -> str:
        """The key of a chunk that the engine's first rank keeps: all ranks store the same chunks at once."""
        rank, tail = f"{self.world_size:02x}00" * 2, f"@{cache_salt}" if cache_salt else ""
        return f"{self.prefix}@{self.model}@{rank}@0@{chunk_hash.hex()}{tail}".removeprefix("@")


def with_images(tokens: Sequence[int], images: Iterable[ImageSpan]) -> array[int]:
    """`tokens` as LMCache hashes them: each placeholder is replaced by its image's value for that place."""
    replaced = array("I", tokens)
    for image in images:
        first, last = max(0, image.start), min(len(replaced), image.start + image.length)
        if first < last:
            replaced[first:last] = _values(image.identifier, first - image.start, last - image.start)
    return replaced


def _values(identifier: str, first: int, last: int) -> array[int]:
    """An image's values for its placeholders from `first` up to `last`: the words of SHA-256 over a counter."""
    seed = sha256(identifier.encode()).digest()
    begin = first // _VALUES_PER_DIGEST
    digests = (sha256(seed + at.to_bytes(8, "big")).digest() for at in range(begin, -(-last // _VALUES_PER_DIGEST)))
    words = array("I", b"".join(digests))
    if sys.byteorder == "little":
        words.byteswap()
    skipped = begin * _VALUES_PER_DIGEST
    return array("I", (word & ((1 << _VALUE_BITS) - 1) for word in words[first - skipped : last - skipped]))


def _big_endian(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()
