"""Checks media in bodies whose prompt is not read in full: removes clients' own ids, refuses hosts and files that are
not allowed."""

from __future__ import annotations

from typing import Any, Final

from gateway.prompt import PromptLimits, Steps
from gateway.prompt.images import media_url_digest

_URL_FIELDS: Final = frozenset({"url", "image_url", "audio_url", "video_url"})
_URL_LISTS: Final = frozenset({"images", "audio", "videos"})  # of /v1/systemone
_VALUES_PER_STEP: Final = 32
"""One step covers this many values, because values that are neither lists nor objects are only skipped."""


def guard_media(document: dict[str, Any], limits: PromptLimits, steps: Steps) -> list[dict[str, Any]]:
    """Removes the `uuid` of every media part in `document`, at any depth, and returns these parts. Raises a 400 for a
    URL that is not allowed, and TooManySteps. It does not recurse, because bodies may be nested deeply."""
    changed: list[dict[str, Any]] = []
    waiting: list[dict[str, Any] | list[Any]] = [document]
    while waiting:
        value = waiting.pop()
        steps.take(1 + len(value) // _VALUES_PER_STEP)
        if isinstance(value, dict):
            if "uuid" in value and ("type" in value or not _URL_FIELDS.isdisjoint(value)):
                del value["uuid"]
                changed.append(value)
            _check_urls(value, limits, steps)
        inner = value.values() if isinstance(value, dict) else value
        waiting += [one for one in inner if isinstance(one, dict | list)]
    return changed


def _check_urls(part: dict[str, Any], limits: PromptLimits, steps: Steps) -> None:
    urls = [(name, part[name]) for name in _URL_FIELDS & part.keys()]
    for name in _URL_LISTS & part.keys():
        urls += [(name, url) for url in part[name]] if isinstance(part[name], list) else []
    steps.take(len(urls))
    for name, url in urls:
        if isinstance(url, str) and url[:4].lower() in ("http", "file"):
            media_url_digest(url, name, limits)
