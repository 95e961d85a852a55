"""A prompt as the gateway knows it: a chain of prefix keys, without tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import orjson
from blake3 import blake3

_ROOT_BYTES = 16
"""The size of a root's digest."""


class ImageSize(NamedTuple):
    """An image's size in pixels, as its header declares it."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """A prompt beyond these limits is refused.

    `image_hosts`: the exact names of the hosts that media may be fetched from; empty means any host.
    `media_folder`: where engines may read media by file: URLs; empty: nowhere.
    """

    max_image_pixels: int
    image_hosts: tuple[str, ...] = ()
    media_folder: str = ""


@dataclass(slots=True)  # not frozen: that would make the object, one per request, three times as expensive
class Prompt:
    """A request's prompt as a chain of prefix keys, shallow to deep.

    `keys`, `text_bytes` and `image_counts` are parallel; all are empty when no prompt could be read.
    """

    model: str
    """As the client named it."""
    keys: list[str]
    """32 hex characters each, without duplicates. The last is the tip."""
    text_bytes: list[int]
    """The bytes of text before the end of each key."""
    image_counts: list[int]
    """How many of `images` come before the end of each key."""
    images: list[ImageSize | None]
    """Sizes in prompt order; None if unknown (an http URL, an unknown format, audio, video)."""
    sample: bytes
    """The root's digest and the first medium, or the beginning of the first message: stays equal as a chat grows."""
    body_changed: bool
    """Whether a media uuid in the body was set or dropped."""
    answer: tuple[int, int] = (0, 0)
    """The last answer in a conversation: how many keys come before it, and how many up to its end; zeros if there is no
    answer, or no key before it: because nothing was asked, or 15 or more messages follow."""

    @property
    def affinity(self) -> bytes:
        """16 bytes for rendezvous hashing, computed on demand: few requests need them."""
        return blake3(self.sample).digest(length=16)

    @property
    def first_content(self) -> bytes:
        """The same without the root: one conversation has the same in all pools."""
        return self.sample[_ROOT_BYTES:]

    def without_keys(self) -> Prompt:
        """This prompt for a pool in which its keys are not known."""
        return replace(self, keys=[], text_bytes=[], image_counts=[], answer=(0, 0))

    def shape(self) -> bytes:
        """The length of each key for the agents, as JSON: see `bound:<slot>` in coordinator/README.md."""
        shape = {"text_bytes": self.text_bytes}
        if self.images:
            shape["image_counts"] = self.image_counts
        return orjson.dumps(shape)
