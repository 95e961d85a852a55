"""Images in a request: their identity, and the number of their placeholder tokens."""

from __future__ import annotations

import binascii
import io
from collections import OrderedDict
from dataclasses import dataclass

from blake3 import blake3
from PIL import Image as PillowImage

from gateway.simulator.errors import bad_request

_MIN_TOKENS = 64
_PIXELS_PER_TOKEN = 161
"""1024x1024 costs about 6500 tokens, like LLaVA-OneVision with its tiles."""
_UNSEEN_SIDE_PIXELS = 1024
"""An http(s) image is never fetched. Its width and height count as this."""
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Image:
    """The engine hashes `identity`: the caller's uuid, which it trusts blindly, or else `content`."""

    identity: str
    content: str
    """The digest of the decoded bytes (data: URL), or the URL itself."""
    tokens: int


def image_tokens(width: int, height: int) -> int:
    """The placeholder tokens of an image with this many pixels."""
    return max(_MIN_TOKENS, round(width * height / _PIXELS_PER_TOKEN))


class ImageReader:
    """Reads image parts, and keeps the last few thousand images (vLLM's multimodal processor cache)."""

    def __init__(self) -> None:
        self._known: OrderedDict[str | bytes | None, Image] = OrderedDict()
        self.queries = 0
        self.hits = 0

    def read(self, url: str | None, uuid: str | None) -> Image:
        """Raises a 400 on anything but a readable data: URL or an http(s) URL.

        A uuid without a URL stands for the image last sent under it, as in vLLM.
        """
        self.queries += 1
        key = uuid if url is None else blake3(url.encode()).digest()
        image = None if key is None else self._known.get(key)
        if image is not None:
            self.hits += 1
        elif url is None:
            raise bad_request(f"An image without data must have been sent before under its uuid, got {uuid!r}")
        else:
            image = _read(url)
        self._remember(key, image)
        if uuid is not None:
            image = Image(uuid, image.content, image.tokens)
            self._remember(uuid, image)
        return image

    def _remember(self, key: str | bytes | None, image: Image) -> None:
        self._known[key] = image
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _read(url: str) -> Image:
    if url.startswith(("http://", "https://")):
        return Image(url, url, image_tokens(_UNSEEN_SIDE_PIXELS, _UNSEEN_SIDE_PIXELS))
    if url.startswith("file:"):
        raise bad_request("Cannot load local files without `--allowed-local-media-path`.")
    if not url.startswith("data:"):
        raise bad_request("The URL must be either a HTTP, data or file URL.")
    header, comma, payload = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise bad_request("Only base64 data URLs are supported for now.")
    try:
        data = binascii.a2b_base64(payload)
        with PillowImage.open(io.BytesIO(data)) as picture:
            width, height = picture.size
    except (OSError, ValueError, SyntaxError, PillowImage.DecompressionBombError) as error:
        raise bad_request(f"Failed to load image: {error}") from error
    digest = blake3(data).hexdigest()
    return Image(digest, digest, image_tokens(width, height))
