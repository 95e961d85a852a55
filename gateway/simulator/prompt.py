"""Prompts as an engine sees them: tokens, image placeholders, and the hashes of their blocks.

A token is four bytes of rendered text. A text that must end with a whole token (before an image, at the end of a
message) is padded with 0xFF, which no UTF-8 text contains. So a longer conversation's tokens start with those of the
shorter one, and an answer of four-byte words has the same tokens when a client sends it back.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import product

from blake3 import blake3

from gateway.simulator.errors import bad_request
from gateway.simulator.images import Image

TOKEN_BYTES = 4
WORDS = ["".join(letters) for letters in product("bdfgklmnprstvzhj", "aeio", "dlnr")]
"""The vocabulary: 256 words of three letters. With a space or a full stop, each is one token."""
_PAD = b"\xff"
_IMAGE_TOKEN = b"\xff\xff\xff\xfe"
_HASH_BYTES = 8
_ROOT = blake3(b"the parent of every first block").digest(_HASH_BYTES)


@dataclass(frozen=True, slots=True)
class ImagePlaceholders:
    """An image's placeholder tokens: `length` of them from `start` on."""

    identity: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt for an engine. `seed` is the digest of its content, independent of the names of images."""

    tokens: bytes
    images: tuple[ImagePlaceholders, ...]
    seed: bytes
    beside: bytes = b""
    """What decides its answers beside its tokens: the adapter, and the content of its images."""
    lora: str | None = None
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def text(self) -> str:
        """Its text, without image placeholders and bytes that are not text."""
        return self.tokens.replace(_IMAGE_TOKEN, b"").replace(_PAD, b"").decode(errors="ignore")


class PromptBuilder:
    """Collects text, images and token ids in order."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._images: list[ImagePlaceholders] = []
        self._contents: list[str] = []

    def text(self, text: str) -> None:
        """Append text. It shares a token with the text before it, unless `end_token` is called between."""
        self._append(text.encode())

    def line(self, text: str) -> None:
        """Append text that shares no token with the pieces around it."""
        self.end_token()
        self.text(text)
        self.end_token()

    def end_token(self) -> None:
        """Let the next piece begin with a new token."""
        if missing := -self._num_bytes % TOKEN_BYTES:
            self._append(_PAD * missing)

    def image(self, image: Image) -> None:
        self.end_token()
        self._images.append(ImagePlaceholders(image.identity, self._num_bytes // TOKEN_BYTES, image.tokens))
        self._contents.append(image.content)
        self._append(_IMAGE_TOKEN * image.tokens)

    def token_ids(self, ids: list[int]) -> None:
        """Raises a 400 unless every id fits 32 bits."""
        try:
            self._append(array("I", ids).tobytes())
        except (OverflowError, TypeError) as error:
            odd = next((each for each in ids if not isinstance(each, int) or not 0 <= each < 2**32), ids)
            raise bad_request(f"Token id {odd} is out of vocabulary") from error

    def build(self, lora: str | None = None, cache_salt: str | None = None) -> EnginePrompt:
        self.end_token()
        tokens = b"".join(self._chunks)
        parts = (lora or "", *self._contents)
        beside = b"".join(len(part).to_bytes(4, "big") + part.encode() for part in parts)
        seed = blake3(tokens).update(beside).digest()
        return EnginePrompt(tokens, tuple(self._images), seed, beside, lora, cache_salt)

    def _append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)


def token_of(piece: str) -> bytes:
    """The token of a generated piece. A longer piece is cut."""
    return piece.encode()[:TOKEN_BYTES].ljust(TOKEN_BYTES, _PAD)


def text_of(token: bytes) -> str:
    """The text of one token; empty for an image's. Half a character is replaced."""
    return "" if token == _IMAGE_TOKEN else token.rstrip(_PAD).decode(errors="replace")


def token_ids(tokens: bytes | bytearray) -> list[int]:
    """The ids that /tokenize shows, and /v1/completions takes back."""
    ids = array("I")
    ids.frombytes(tokens)
    return ids.tolist()


def token_text(ids: list[int]) -> str:
    """The text of token ids, without image placeholders and bytes that are not text."""
    builder = PromptBuilder()
    builder.token_ids(ids)
    return builder.build().text


def extra_keys(prompt: EnginePrompt, block_size: int) -> dict[int, tuple[object, ...]]:
    """The extra keys of block hashes, by block index, as in vLLM.

    They are the LoRA name, then (image identity, the image's offset from the block's start) for each image in the
    block, then the salt in block 0. Blocks without image and salt are left out; they have only the LoRA name, if there
    is one.
    """
    lora = (prompt.lora,) if prompt.lora else ()
    keys: dict[int, tuple[object, ...]] = {}
    for span in prompt.images:
        last = (span.start + span.length - 1) // block_size
        for block in range(span.start // block_size, last + 1):
            keys[block] = (*keys.get(block, lora), (span.identity, span.start - block * block_size))
    if prompt.cache_salt:
        keys[0] = (*keys.get(0, lora), prompt.cache_salt)
    return keys


class BlockHasher:
    """Chains the hashes of a sequence's full blocks, over the prompt and then over what is generated."""

    def __init__(self, prompt: EnginePrompt, block_size: int) -> None:
        self.hashes: list[int] = []
        """64-bit hashes, shallow to deep."""
        self._block_size = block_size
        self._lora: tuple[object, ...] | None = (prompt.lora,) if prompt.lora else None
        self._extra = extra_keys(prompt, block_size)
        self._parent = _ROOT

    def extra_keys(self, first: int, last: int) -> list[tuple[object, ...] | None]:
        """The extra keys of each block from `first` up to `last`; None if a block has none."""
        return [self._extra.get(block, self._lora) for block in range(first, last)]

    def extend(self, tokens: bytes | bytearray) -> None:
        """Hash the blocks of the sequence's `tokens` (all of them so far) that have become full."""
        width = self._block_size * TOKEN_BYTES
        parent, extra, lora = self._parent, self._extra, self._lora
        for block in range(len(self.hashes), len(tokens) // width):
            content = bytes(tokens[block * width : (block + 1) * width])
            keys = extra.get(block, lora)
            parent = blake3(parent + content + (repr(keys).encode() if keys else b"")).digest(_HASH_BYTES)
            self.hashes.append(int.from_bytes(parent, "big"))
        self._parent = parent
