"""Tells refusals that are one replica's own from those that every replica would give. Pure.

The replicas of a model may differ: an adapter is loaded on some of them, some take longer prompts, and only some take
images. A 4xx may then mean "not here", and another replica can serve the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import orjson

Reason = Literal["not_served", "too_long", "media_refused", ""]
"""What the replica does not have: the model, the length, the medium. Empty: the refusal is not its own."""

NOT_FOUND = 404
REFUSALS = frozenset({400, NOT_FOUND, 413, 422})
_MAX_ERROR_BYTES = 16 * 1024
_TOO_LARGE = 413
_LENGTH = re.compile(rb"context|length|too (?:long|large|many)|max_model_len|token", re.IGNORECASE)
_MEDIA = re.compile(rb"multi-?modal|image|audio|video", re.IGNORECASE)


def own_refusal(status: int, body: bytes, model: str | None, *, has_longer: bool, has_media: bool) -> Reason:
    """Why another replica may serve a request that one has refused with this status and body. `has_longer`: another
    replica takes longer prompts. `has_media`: the prompt has images or other media."""
    if status not in REFUSALS or len(body) > _MAX_ERROR_BYTES:
        return ""
    if status == NOT_FOUND:
        return "not_served" if model is not None and _names_model(body, model) else ""
    if has_longer and (status == _TOO_LARGE or _LENGTH.search(body)):
        return "too_long"
    return "media_refused" if has_media and _MEDIA.search(body) else ""


def _names_model(body: bytes, model: str) -> bool:
    """Whether the error is about the model. vLLM says so in `param`, OpenAI in `code`, others only in words."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    error = document.get("error", document) if isinstance(document, Mapping) else None
    if not isinstance(error, Mapping):
        return False
    if error.get("param") == "model" or error.get("code") == "model_not_found":
        return True
    message = error.get("message")
    named = rf"(?<![\w/.-]){re.escape(model)}(?![\w/.-])"
    return isinstance(message, str) and re.search(named, message) is not None
