"""Decides which paths may reach a replica, and how they are written there. Pure.

The gateway checks the path that it sends: the client's path, decoded once and then encoded again. Clients and servers
disagree about `..`, `//`, a backslash and a second layer of escapes, so a path with any of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast, get_args
from urllib.parse import parse_qs, quote, unquote_plus

from gateway.endpoints import ENDPOINTS, FOLDERS, OF_EACH_REPLICA, OWN_PATHS, REFUSED, Endpoint, Stored
from gateway.errors import ApiError

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_AMBIGUOUS = re.compile(r"//|/\.{1,2}(?:/|\Z)|/\Z|[\x00-\x1f\x7f\\%]")
_OBJECT = re.compile(f"/v1/({'|'.join(get_args(Stored))})/([^/]+)(?:/.*)?")
_DECISIONS = "/v1/decisions"
_SAFE_IN_PATH = "/:@!$&'()*+,;=~"
_SAFE_IN_QUERY = _SAFE_IN_PATH + "?%[]"


class PathRules:
    """Which paths go to a replica. `allowed` and `denied` are paths, each with what lies below it; `denied` wins."""

    def __init__(self, allowed: Iterable[str], denied: Iterable[str]) -> None:
        self._denied = tuple(folded(path) for path in denied)
        self._allowed = tuple(path.rstrip("/") for path in allowed)
        self._known = frozenset(path for path in ENDPOINTS if not is_below(folded(path), self._denied))

    def is_for_replicas(self, method: str, path: str) -> bool:
        """Whether a request is meant for a replica. It may still be refused. The gateway answers all others."""
        if path in self._known:
            return path != _DECISIONS or method == "POST"  # GET is the gateway's own
        if is_below(path, OWN_PATHS) or is_below(path, (_DECISIONS,)):
            return False
        return path.startswith("/v1/") or is_below(folded(path), REFUSED) or self._passes(path) or path in ENDPOINTS

    def may_pass(self, path: str) -> bool:
        """Whether a request that is none of an API may go to any replica as it came, if a proxy asks where."""
        return path in OF_EACH_REPLICA and not is_below(folded(path), self._denied)

    def refuse(self, path: str) -> None:
        """Raises a 404 if the path must not reach a replica."""
        if path not in self._known and (why := self._why_refused(path)):
            raise ApiError(404, "path_not_allowed", f"{path} is not available through this gateway: {why}.")

    def _why_refused(self, path: str) -> str:
        if _AMBIGUOUS.search(path) is not None:
            return "clients and servers can read it in more than one way"
        asked = folded(path)
        if is_below(asked, self._denied):
            return "security.denied_paths names it"
        reason = next((why for refused, why in REFUSED.items() if is_below(asked, (refused,))), "")
        if reason or self._passes(path):
            return reason
        return "KVGate does not know it (security.allowed_paths can pass it on)"

    def _passes(self, path: str) -> bool:
        return path.startswith(FOLDERS) or is_below(path, self._allowed)


def is_below(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a path is one of these, or lies below one of them."""
    return any(path == prefix or path.startswith(prefix + "/") for prefix in prefixes)


def folded(path: str) -> str:
    """A path in the form in which deny lists compare paths: letter case does not matter."""
    return path.rstrip("/").casefold()


def may_have_effects(method: str, endpoint: Endpoint) -> bool:
    """Whether a request with this method and endpoint may do more than compute its answer."""
    return method not in _SAFE_METHODS and not endpoint.is_pure


def upstream_target(path: str, query: bytes) -> str:
    """The path and query for the replica. The path is the one that was checked."""
    target = path if path in ENDPOINTS else quote(path, safe=_SAFE_IN_PATH)
    return f"{target}?{quote(query, safe=_SAFE_IN_QUERY)}" if query else target


def object_in_path(path: str) -> tuple[Stored, str] | None:
    """The kind and the id of the object that a path names; None if it names none."""
    found = _OBJECT.fullmatch(path) if path.startswith(FOLDERS) and path not in ENDPOINTS else None
    return (cast("Stored", found[1]), found[2]) if found else None


def model_in_query(query: bytes) -> str | None:
    """The model that a query names; the last one, if there are several."""
    named = parse_qs(query.decode("latin-1")).get("model") if b"model" in query else None
    return named[-1] if named else None


def with_model_in_query(target: str, model: str) -> str:
    """A path and query that name this model, wherever they name one. All else stays as it is."""
    path, _, query = target.partition("?")
    fields = (
        f"model={quote(model, safe='')}" if unquote_plus(each.partition("=")[0]) == "model" else each
        for each in query.split("&")
    )
    return f"{path}?{'&'.join(fields)}"
