"""Checks media in bodies whose prompt is not read in full: removes clients' own ids, refuses hosts and files that are
not allowed."""

from __future__ import annotations

import re
from typing import Any, Final

from gateway.prompt import PromptLimits, Steps
from gateway.prompt.images import identify_image, media_url_digest

_URL_FIELDS: Final = frozenset({"url", "image_url", "audio_url", "video_url"})
_URL_LISTS: Final = frozenset({"images", "audio", "videos"})  # of /v1/systemone
_SCHEME_CHARS: Final = 32
_NAMES_A_PLACE: Final = re.compile(r"//|file:", re.IGNORECASE)
"""In the beginning of a URL. Readers skip spaces before a scheme, and tabs within it."""
_CHARS_PER_STEP: Final = 65_536
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
        if not isinstance(url, str):
            continue
        if url[:11].lower() == "data:image/":
            steps.take(len(url) // _CHARS_PER_STEP)
            identify_image(url, name, limits)
        elif _NAMES_A_PLACE.search(url, 0, _SCHEME_CHARS) and (limits.image_hosts or _names_a_file(url)):
            media_url_digest(url, name, limits)


def _names_a_file(url: str) -> bool:
    return "file" in url[:_SCHEME_CHARS].lower()
