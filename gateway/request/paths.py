"""Which paths may reach a replica, and how they are spelled there.

A path is judged and sent on in one form: decoded once, as ASGI gives it, then encoded again. What `..`, `//`, a
backslash or a second layer of escapes means differs between the clients and servers on the way (aiohttp's client
resolves `..` by itself), so a path with any of them goes nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

USAGE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
PROMPT_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    }
)
PURE_PATHS = PROMPT_PATHS | frozenset(
    {
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/responses/render",
        "/v1/systemone",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/moderations",
        "/detokenize",
        "/classify",
        "/pooling",
    }
)
"""Where a POST only computes its answer: vLLM's paths, and those of OpenAI's that other servers have. Of a response its
body tells whether that is all."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_AMBIGUOUS = re.compile(r"//|/\.{1,2}(?:/|\Z)|/\Z|[\x00-\x1f\x7f\\%]")
_OF_RESPONSES = "/v1/responses/"
_BY_RESPONSE = re.compile(_OF_RESPONSES + r"([^/]+)(?:/.*)?")
_SAFE_IN_PATH = "/:@!$&'()*+,;=~"
_SAFE_IN_QUERY = _SAFE_IN_PATH + "?%[]"


def is_plain(path: str) -> bool:
    """Whether everybody on the way reads this decoded path alike."""
    return _AMBIGUOUS.search(path) is None


def is_denied(path: str, denied: Iterable[str]) -> bool:
    """Whether a path is one of `denied` (folded), or lies below one; in any case of its letters."""
    asked = folded(path)
    return any(asked == one or asked.startswith(one + "/") for one in denied)


def folded(path: str) -> str:
    """A path as deny lists compare it."""
    return path.rstrip("/").casefold()


def may_have_effects(method: str, path: str) -> bool:
    """Whether a request may do more than compute its answer, as far as method and path tell."""
    return method not in _SAFE_METHODS and path not in PURE_PATHS


def upstream_target(path: str, query: bytes) -> str:
    """Path and query as a replica gets them: what was judged is what is sent."""
    target = path if path in PROMPT_PATHS else quote(path, safe=_SAFE_IN_PATH)
    return f"{target}?{quote(query, safe=_SAFE_IN_QUERY)}" if query else target


def stored_response(path: str) -> str:
    """The id of the stored response that a path is about; empty where it is about none."""
    found = _BY_RESPONSE.fullmatch(path) if path.startswith(_OF_RESPONSES) else None
    return found[1] if found else ""
