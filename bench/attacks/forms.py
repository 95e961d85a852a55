"""Attacks with multipart forms, as clients use them to upload audio."""

from __future__ import annotations

from bench.attacks.attack import Outcome, Run, one_request
from bench.attacks.target import LIMIT_BYTES, Target

_PATH = "/v1/audio/transcriptions"
_KIND = "multipart/form-data; boundary=b"
_END = b"--b--\r\n"


def _filled(unit: bytes, size_bytes: int) -> bytes:
    return unit * (size_bytes // len(unit))


def no_blank_lines(size_bytes: int) -> Run:
    """Repeats the field's name in a part's head that never ends."""

    async def run(target: Target) -> Outcome:
        return await one_request(
            target, _PATH, b"--b\r\n" + _filled(b'name="model"\r\nx\r\n', size_bytes) + _END, _KIND
        )

    return run


async def many_parts(target: Target) -> Outcome:
    part = b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n'
    return await one_request(target, _PATH, _filled(part, LIMIT_BYTES - 100) + _END, _KIND)


async def long_heads(target: Target) -> Outcome:
    head = b'content-disposition: form-data; name="model"\r\n' + _filled(b"x-a: b\r\n", 8_000)
    return await one_request(target, _PATH, _filled(b"--b\r\n" + head + b"\r\n\r\n", LIMIT_BYTES - 100) + _END, _KIND)


async def near_boundaries(target: Target) -> Outcome:
    """Data that looks like the boundary up to its last byte."""
    kind = f"multipart/form-data; boundary={'b' * 70}"
    start = b"--" + b"b" * 70 + b'\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    near = _filled(b"\r\n--" + b"b" * 69, LIMIT_BYTES - 1000)
    return await one_request(target, _PATH, start + near + b"\r\n--" + b"b" * 70 + b"--\r\n", kind)
