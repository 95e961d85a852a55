"""Decides which paths may reach a replica, and how they are spelled there.

A path is judged and sent on in one form: decoded once, as ASGI gives it, then encoded again. Clients and servers do not
agree on the meaning of `..`, `//`, a backslash or a second layer of escapes. So a path with any of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from gateway.endpoints import ENDPOINTS, Endpoint

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_AMBIGUOUS = re.compile(r"//|/\.{1,2}(?:/|\Z)|/\Z|[\x00-\x1f\x7f\\%]")
_OF_RESPONSES = "/v1/responses/"
_BY_RESPONSE = re.compile(_OF_RESPONSES + r"([^/]+)(?:/.*)?")
_SAFE_IN_PATH = "/:@!$&'()*+,;=~"
_SAFE_IN_QUERY = _SAFE_IN_PATH + "?%[]"


def is_plain(path: str) -> bool:
    """Whether every client and server reads this decoded path in the same way."""
    return _AMBIGUOUS.search(path) is None


def is_denied(path: str, denied: Iterable[str]) -> bool:
    """Whether a path is one of `denied` (folded) or lies below one. Upper and lower case are the same."""
    asked = folded(path)
    return any(asked == one or asked.startswith(one + "/") for one in denied)


def folded(path: str) -> str:
    """A path as deny lists compare it."""
    return path.rstrip("/").casefold()


def may_have_effects(method: str, endpoint: Endpoint) -> bool:
    """Whether a request may do more than compute its answer, as far as its method and endpoint tell."""
    return method not in _SAFE_METHODS and not endpoint.is_pure


def upstream_target(path: str, query: bytes) -> str:
    """Path and query as a replica gets them: the path that was judged is the path that is sent."""
    target = path if path in ENDPOINTS else quote(path, safe=_SAFE_IN_PATH)
    return f"{target}?{quote(query, safe=_SAFE_IN_QUERY)}" if query else target


def stored_response_id(path: str) -> str:
    """The id of the stored response that a path names; empty if it names none."""
    found = _BY_RESPONSE.fullmatch(path) if path.startswith(_OF_RESPONSES) else None
    return found[1] if found else ""
