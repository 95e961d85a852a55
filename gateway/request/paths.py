"""Decides which paths may reach a replica, and how they are written there.

The gateway checks the path that it sends: the client's path, decoded once and then encoded again. Clients and servers
disagree about `..`, `//`, a backslash and a second layer of escapes, so a path with any of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from gateway.endpoints import ENDPOINTS, Endpoint

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_AMBIGUOUS = re.compile(r"//|/\.{1,2}(?:/|\Z)|/\Z|[\x00-\x1f\x7f\\%]")
_STORED_RESPONSES = "/v1/responses/"
_STORED_RESPONSE = re.compile(_STORED_RESPONSES + r"([^/]+)(?:/.*)?")
_SAFE_IN_PATH = "/:@!$&'()*+,;=~"
_SAFE_IN_QUERY = _SAFE_IN_PATH + "?%[]"


def is_plain(path: str) -> bool:
    """Whether all clients and servers read this decoded path in the same way."""
    return _AMBIGUOUS.search(path) is None


def is_denied(path: str, denied: Iterable[str]) -> bool:
    """Whether a path is in `denied` (`folded` paths) or lies below a path in it. Letter case does not matter."""
    asked = folded(path)
    return any(asked == prefix or asked.startswith(prefix + "/") for prefix in denied)


def folded(path: str) -> str:
    """A path in the form in which deny lists compare paths."""
    return path.rstrip("/").casefold()


def may_have_effects(method: str, endpoint: Endpoint) -> bool:
    """Whether a request with this method and endpoint may do more than compute its answer."""
    return method not in _SAFE_METHODS and not endpoint.is_pure


def upstream_target(path: str, query: bytes) -> str:
    """The path and query for the replica. The path is the one that was checked."""
    target = path if path in ENDPOINTS else quote(path, safe=_SAFE_IN_PATH)
    return f"{target}?{quote(query, safe=_SAFE_IN_QUERY)}" if query else target


def stored_response_id(path: str) -> str:
    """The id of the stored response in a path; empty if there is none."""
    found = _STORED_RESPONSE.fullmatch(path) if path.startswith(_STORED_RESPONSES) else None
    return found[1] if found else ""
