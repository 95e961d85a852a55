"""The size that an image's header declares, read from a bounded part of it: PNG, JPEG, GIF and WebP.

Nothing is decoded. The size is unknown (None) for any other format, and if the header ends beyond the limits below.
"""

from __future__ import annotations

from typing import Final

from gateway.prompt.prompt import ImageSize

_MAX_SEGMENTS: Final = 1024
"""Segments of a JPEG before its frame header. Cameras write a dozen; a profile or thumbnail takes one per 64 KiB."""
_MAX_JPEG_BYTES: Final = 2**22

# SOF0 to SOF15 without DHT, JPG and DAC, whose numbers lie between (ITU-T T.81, table B.1).
_FRAME_HEADERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD9)})
_END_OR_SCAN: Final = frozenset({0xD9, 0xDA})


def read_image_size(data: bytes) -> ImageSize | None:
    """The size in pixels; None for another format, a broken header, or one that ends too far into the file."""
    size = None
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        size = _pair(data, 16, 4, "big")
    elif data.startswith((b"GIF87a", b"GIF89a")):
        size = _pair(data, 6, 2, "little")
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        size = _webp(data)
    elif data.startswith(b"\xff\xd8"):
        size = _jpeg(data)
    return size if size is not None and size.width and size.height else None


def _pair(data: bytes, at: int, width_bytes: int, order: str) -> ImageSize | None:
    """Width, then height, of `width_bytes` bytes each."""
    if len(data) < at + 2 * width_bytes:
        return None
    first, second = data[at : at + width_bytes], data[at + width_bytes : at + 2 * width_bytes]
    if order == "big":
        return ImageSize(int.from_bytes(first, "big"), int.from_bytes(second, "big"))
    return ImageSize(int.from_bytes(first, "little"), int.from_bytes(second, "little"))


def _webp(data: bytes) -> ImageSize | None:
    """The first chunk tells: lossy, lossless, or extended (RFC 9649)."""
    kind = data[12:16]
    if kind == b"VP8X":
        less_one = _pair(data, 24, 3, "little")
        return less_one and ImageSize(less_one.width + 1, less_one.height + 1)
    if kind == b"VP8L" and data[20:21] == b"\x2f" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return ImageSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        scaled = _pair(data, 26, 2, "little")
        return scaled and ImageSize(scaled.width & 0x3FFF, scaled.height & 0x3FFF)
    return None


def _jpeg(data: bytes) -> ImageSize | None:
    """Walks the segments up to the frame header."""
    place = 2
    for _ in range(_MAX_SEGMENTS):
        if place + 9 > min(len(data), _MAX_JPEG_BYTES) or data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in _FRAME_HEADERS:
            height_first = _pair(data, place + 5, 2, "big")
            return height_first and ImageSize(height_first.height, height_first.width)
        elif marker in _END_OR_SCAN:
            return None
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None
