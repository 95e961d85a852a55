"""Takes token ids out of an answer that the gateway has asked for, and its client has not.

A stream that may have to go on at another replica asks for them: see sent.py. Requests that claim keys at an engine
before vLLM 0.30 ask for them, too, if its agent is older than 0.2 (mode `token_ids`).
"""

from __future__ import annotations

from typing import Final

ASK: Final = {"return_token_ids": True}
"""The field that asks vLLM for the token ids of the prompt and of the answer."""
_MARKS = (b'"prompt_token_ids":[', b'"token_ids":[', b'"prompt_token_ids": [', b'"token_ids": [')
"""How lists of ids begin. Text cannot imitate them: inside a string, quotation marks have a backslash."""


def without_ids(data: bytes) -> bytes:
    """A JSON text, or whole events, with null for each list of token ids: so vLLM says it if nobody has asked."""
    for mark in _MARKS:
        at = data.find(mark)
        if at >= 0:
            data = _without(data, mark, at)
    return data


def _without(data: bytes, mark: bytes, at: int) -> bytes:
    parts, done = list[bytes](), 0
    while at >= 0 and (end := data.find(b"]", at)) >= 0:
        parts += (data[done : at + len(mark) - 1], b"null")
        done = end + 1
        at = data.find(mark, done)
    return b"".join((*parts, data[done:]))
