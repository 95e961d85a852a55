"""Takes token ids out of an answer that the gateway has asked for, and its client has not.

A stream that may have to go on at another replica asks for them: see sent.py. Requests that claim keys at an engine
before vLLM 0.30 ask for them, too, if its agent is older than 0.2 (mode `token_ids`).
"""

from __future__ import annotations

import re
from typing import Final

ASK: Final = {"return_token_ids": True}
"""The field that asks vLLM for the token ids of the prompt and of the answer."""
_LISTS: Final = re.compile(rb'token_ids":(?:(?<="token_ids":)|(?<="prompt_token_ids":)) ?\[[^\]]*\]')
"""The lists of ids. Other names may end in the same way. Text cannot imitate them: inside a string, quotation marks
have a backslash. The names are looked at from behind, so that the search is one for plain bytes."""
_NULL: Final = b'token_ids":null'
_OF_PROMPT = b'"prompt_token_ids":['
_BEGINNING_BYTES = 2048
"""The ids of a prompt begin this early in a stream."""


def without_prompt_ids(data: bytes) -> tuple[bytes, bytes]:
    """The beginning of a stream with null for the ids of its prompt, and these ids as they stand in its JSON; empty if
    there are none. They are most of the bytes: whoever searches those need not search these."""
    at = data.find(_OF_PROMPT, 0, _BEGINNING_BYTES) + len(_OF_PROMPT)
    end = data.find(b"]", at) if at >= len(_OF_PROMPT) else -1
    if end < 0:
        return data, b""
    return b"".join((data[: at - 1], b"null", data[end + 1 :])), data[at:end]


def without_ids(data: bytes) -> bytes:
    """A JSON text, or whole events, with null for each list of token ids: so vLLM says it if nobody has asked."""
    return _LISTS.sub(_NULL, data)
