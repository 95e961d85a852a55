"""An answer's head: status line, Date, headers."""

from __future__ import annotations

import http
import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n".encode()


def answer_head(status: int, headers: Iterable[tuple[bytes, bytes]], last_lines: bytes) -> bytes:
    """All of it, up to the empty line; `last_lines` are headers too, each with its line end."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join((_STATUS_LINES[status], _date_line(int(time.time())), *lines, last_lines, b"\r\n"))
