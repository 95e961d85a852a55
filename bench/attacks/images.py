"""Attacks with images whose headers are long or broken."""

from __future__ import annotations

import base64
import struct
import zlib

from bench.attacks.attack import Outcome, Run, one_request
from bench.attacks.target import Target

_LOG_LINES = 10
"""Most log lines that one image may cause."""


def chat_with(kind: str, images: list[bytes]) -> bytes:
    """A chat with these images as data URLs."""
    part = '{"type":"image_url","image_url":{"url":"data:image/%s;base64,%s"}}'
    parts = ",".join(part % (kind, base64.b64encode(image).decode()) for image in images)
    return f'{{"model":"canned","max_tokens":16,"messages":[{{"role":"user","content":[{parts}]}}]}}'.encode()


async def _ask_about(target: Target, kind: str, images: list[bytes]) -> Outcome:
    return await one_request(target, "/v1/chat/completions", chat_with(kind, images))


def png(texts: int) -> bytes:
    """A PNG with this many compressed texts. Each has one MiB, but is small in the request."""
    text = _chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**20), 9))
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + text * texts + _chunk(b"IDAT", zlib.compress(bytes(64 * 193)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def jpeg(size_bytes: int) -> bytes:
    """A JPEG with empty APP markers in front of its size."""
    frame = b"\xff\xc0" + struct.pack(">HBHHBBBB", 11, 8, 64, 64, 1, 1, 0x11, 0)
    return b"\xff\xd8" + b"\xff\xe1\x00\x02" * (size_bytes // 4) + frame + b"\xff\xd9"


def tiff(broken: int) -> bytes:
    """A TIFF with this many tags that claim more data than the file has."""
    plain = ((256, 4, 64), (257, 4, 64), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (279, 4, 100))
    tags = [struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in plain]
    tags += [struct.pack("<HHII", 1000 + index, 2, 10**6, 8) for index in range(broken)]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(tags) + bytes(4)


async def png_texts(target: Target) -> Outcome:
    return await _ask_about(target, "png", [png(60)] * 10)


def jpeg_markers(size_bytes: int) -> Run:
    async def run(target: Target) -> Outcome:
        return await _ask_about(target, "jpeg", [jpeg(size_bytes)])

    return run


async def tiff_tags(target: Target) -> Outcome:
    """Counts the lines that the gateway logs about these images."""
    before = _lines(target)
    outcome = await _ask_about(target, "tiff", [tiff(400)])
    lines = _lines(target) - before
    missed = f"{lines} lines in the log, of {_LOG_LINES} that one image may cost" if lines > _LOG_LINES else ""
    return Outcome(f"{outcome.got}; {lines} lines in the gateway's log", missed)


def _lines(target: Target) -> int:
    return target.log.read_bytes().count(b"\n")
