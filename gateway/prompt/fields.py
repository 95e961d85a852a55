"""JSON values of a body as bytes for the stream. A wrong type raises a 400 that names the field."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.errors import bad_field

Json = Any
"""What a JSON parser returns: dict, list, str, int, float, bool or None."""

# No chat template sees these fields: the engine drops them, or reads them for something else. SDKs add
# and move them between turns (`cache_control` marks another message every turn), so they must not
# change a key.
IGNORED_FIELDS = frozenset({"annotations", "cache_control", "detail", "logprobs", "refusal", "uuid"})


def utf8(value: Json, param: str) -> bytes:
    """The bytes of a string."""
    if not isinstance(value, str):
        raise bad_field(param, "must be a string")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise bad_field(param, "must be valid Unicode; it has a lone surrogate") from None


def optional_utf8(value: Json, param: str) -> bytes | None:
    """The bytes of a string, or None for null."""
    return None if value is None else utf8(value, param)


def object_at(value: Json, param: str) -> dict[str, Json]:
    """`value`, if it is an object."""
    if not isinstance(value, dict):
        raise bad_field(param, "must be an object")
    return value


def list_at(value: Json, param: str) -> list[Json]:
    """`value`, if it is a list."""
    if not isinstance(value, list):
        raise bad_field(param, "is required, and must be a list" if value is None else "must be a list")
    return value


def ordered_json(value: Json, param: str) -> bytes:
    """Compact JSON with the keys in the client's order, for values that a template renders unchanged."""
    return _dumps(value, param, 0)


def sorted_json(value: Json, param: str) -> bytes:
    """Compact JSON with sorted keys, for values that the engine looks up by name."""
    return _dumps(value, param, orjson.OPT_SORT_KEYS)


def _dumps(value: Json, param: str, option: int) -> bytes:
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # too deep, a lone surrogate, or an integer over 64 bits
        raise bad_field(param, "is nested too deeply or holds a value that JSON cannot carry") from None
