"""Estimates the tokens up to each key. The placement cost uses them; no key depends on them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gateway.prompt.prompt import ImageSize, Prompt

_KEPT: Final = 0.9  # the weight of all earlier observations, at each new one

# The first estimates. They weigh as much as one observed prompt of 1 KB, and as a hundredth of an image.
_START_TEXT_BYTES: Final = 1024.0
_START_BYTES_PER_TOKEN: Final = 4.0
_START_IMAGES: Final = 0.01
_START_TOKENS_PER_IMAGE: Final = 1000.0
_START_TOKENS_PER_PIXEL: Final = 6500 / 1024**2

_MIN_BYTES_PER_TOKEN: Final = 0.5
_MAX_BYTES_PER_TOKEN: Final = 16.0
_MIN_OBSERVED_TEXT_BYTES: Final = 64  # in shorter texts, most tokens are the template's own

_MAX_SIZES: Final = 1024


class _Ratio:
    """The ratio of two sums in which older values weigh less. A longer prompt weighs more than a short one."""

    __slots__ = ("_above", "_below")

    def __init__(self, above: float, below: float) -> None:
        self._above = above
        self._below = below

    @property
    def value(self) -> float:
        return self._above / self._below

    def observe(self, above: float, below: float) -> None:
        self._above = self._above * _KEPT + above
        self._below = self._below * _KEPT + below


class TokenEstimator:
    """Learns from `usage.prompt_tokens` how many tokens one model makes of text and images."""

    def __init__(self) -> None:
        pixels = _START_IMAGES * 1024**2
        self._bytes_per_token = _Ratio(_START_TEXT_BYTES, _START_TEXT_BYTES / _START_BYTES_PER_TOKEN)
        self._tokens_per_pixel = _Ratio(_START_TOKENS_PER_PIXEL * pixels, pixels)
        self._tokens_per_image = _Ratio(_START_TOKENS_PER_IMAGE * _START_IMAGES, _START_IMAGES)
        self._tokens_by_size: OrderedDict[ImageSize, _Ratio] = OrderedDict()  # oldest use first

    @property
    def bytes_per_token(self) -> float:
        return self._bytes_per_token.value

    def estimate(self, prompt: Prompt) -> list[int]:
        """The tokens up to each of the prompt's keys, in ascending order."""
        bytes_per_token = self._bytes_per_token.value
        if not prompt.images:
            return [int(text_bytes / bytes_per_token) for text_bytes in prompt.text_bytes]
        image_tokens = [0.0]
        for size in prompt.images:
            image_tokens.append(image_tokens[-1] + self.image_tokens(size))
        return [
            int(text_bytes / bytes_per_token + image_tokens[images])
            for text_bytes, images in zip(prompt.text_bytes, prompt.image_counts, strict=True)
        ]

    def image_tokens(self, size: ImageSize | None) -> float:
        """The tokens of one image: those observed for its size, else by its pixels, else the mean of all images."""
        if size is None:
            return self._tokens_per_image.value
        seen = self._tokens_by_size.get(size)
        return size.width * size.height * self._tokens_per_pixel.value if seen is None else seen.value

    def observe(self, prompt: Prompt, prompt_tokens: int) -> None:
        """Learn from the number of tokens that the engine counted for the whole prompt."""
        if not prompt.keys or prompt_tokens <= 0:
            return
        text_bytes = prompt.text_bytes[-1]
        if prompt.images:
            self._observe_images(prompt.images, prompt_tokens - text_bytes / self.bytes_per_token)
        elif text_bytes >= _MIN_OBSERVED_TEXT_BYTES:
            tokens = min(max(prompt_tokens, text_bytes / _MAX_BYTES_PER_TOKEN), text_bytes / _MIN_BYTES_PER_TOKEN)
            self._bytes_per_token.observe(text_bytes, tokens)

    def _observe_images(self, images: list[ImageSize | None], tokens: float) -> None:
        """Divide the images' tokens among them in proportion to the estimates."""
        expected = [self.image_tokens(size) for size in images]
        total = sum(expected)
        if tokens <= 0 or total <= 0:  # the text was overestimated: nothing to learn about images
            return
        for size, tokens_expected in zip(images, expected, strict=True):
            seen = tokens_expected * tokens / total
            self._tokens_per_image.observe(seen, 1)
            if size is not None and size.width * size.height:
                self._tokens_per_pixel.observe(seen, size.width * size.height)
                self._observe_size(size, seen)

    def _observe_size(self, size: ImageSize, tokens: float) -> None:
        ratio = self._tokens_by_size.pop(size, None) or _Ratio(0, 0)
        ratio.observe(tokens, 1)
        self._tokens_by_size[size] = ratio
        if len(self._tokens_by_size) > _MAX_SIZES:
            self._tokens_by_size.popitem(last=False)
