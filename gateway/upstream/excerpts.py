"""Reads parts of JSON that is not parsed as a whole, because that could hold the event loop for too long.

coordinator/engine/light_json.py tells which documents may be parsed as a whole.
"""

from __future__ import annotations

import json
import re
from typing import Any

WINDOW_BYTES = 16 * 1024
"""The part at the beginning or the end that is searched."""
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
