"""Reads parts of JSON that is not parsed as a whole, because parsing it could block the event loop for too long.

orjson parses a megabyte of text in 2 ms, but a megabyte of `[],[],…` in 40 ms.
"""

from __future__ import annotations

import json
import re
from typing import Any

WINDOW_BYTES = 16 * 1024
"""The part at the beginning or the end that is searched."""
MAX_CONTAINERS = 32 * 1024
"""Objects and lists in large JSON that is parsed as a whole."""
_MAX_DECODED = 4
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


def last_usage(data: bytes) -> dict[str, Any] | None:
    """The object under the last key `usage` near the end of `data`, which is a JSON document or contains one. Text
    content cannot imitate that key: inside a string, quotation marks have a backslash."""
    window = data[-WINDOW_BYTES:]
    for found in reversed(list(_USAGE.finditer(window))[-_MAX_DECODED:]):
        try:
            usage, _ = _DECODER.raw_decode(window[found.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(usage, dict):
            return usage
    return None


def is_light(data: bytes) -> bool:
    """Whether JSON of one or two megabytes has few objects and lists, so that parsing it takes a few milliseconds."""
    return data.count(b"{") + data.count(b"[") <= MAX_CONTAINERS
