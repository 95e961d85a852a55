"""What the gateway knows of a prompt: its chain of prefix keys, never its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import orjson
from blake3 import blake3


class ImageSize(NamedTuple):
    """An image's size in pixels, as its header declares it."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the gateway refuses in a prompt.

    `image_hosts`: the only hosts that media may be fetched from, by exact name; empty means any.
    `max_messages`: messages of a conversation, items of a response's input, documents to rank.
    `max_content_parts`: content parts of all messages together.
    """

    max_image_pixels: int = 100_000_000
    image_hosts: tuple[str, ...] = ()
    max_messages: int = 16_384
    max_content_parts: int = 16_384


@dataclass(slots=True)  # not frozen: one is made for every request, and that would treble what it costs
class Prompt:
    """A request's prompt as a chain of prefix keys, shallow to deep.

    `keys`, `text_bytes` and `image_counts` are parallel; all are empty when no prompt could be read.
    """

    model: str
    """As the client named it."""
    keys: list[str]
    """32 hex characters each, without duplicates. The last is the tip."""
    text_bytes: list[int]
    """Bytes of text behind each key."""
    image_counts: list[int]
    """How many of `images` are behind each key."""
    images: list[ImageSize | None]
    """Sizes in prompt order; None where unknown (an http URL, an unknown format, audio, video)."""
    sample: bytes
    """What is likely to be asked about again, and stands for it: its beginning, its first image."""
    body_changed: bool
    """The body was edited (a media uuid set or dropped) and must be serialised again."""
    image_ids: tuple[str, ...] = ()
    """The uuids that the gateway gave to images, in prompt order: what the engine calls them."""

    @property
    def affinity(self) -> bytes:
        """16 bytes for rendezvous hashing: only few requests need them."""
        return blake3(self.sample).digest(length=16)

    def shape(self) -> bytes:
        """What lies behind each key, for the agents: see `bind` in coordinator/README.md."""
        shape: dict[str, object] = {"text_bytes": self.text_bytes}
        if self.images:
            shape |= {"image_counts": self.image_counts, "image_ids": self.image_ids}
        return orjson.dumps(shape)
