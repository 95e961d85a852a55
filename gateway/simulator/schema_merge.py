"""Merges two JSON schemas, keyword by keyword, into one that accepts what both accept; for json_schema.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.simulator.json_scalars import NoValue


def merged(one: dict[str, Any], other: object) -> dict[str, Any]:
    """Raises NoValue if no value can satisfy both."""
    if other is True:
        return one
    if not isinstance(other, dict):
        raise NoValue(f"Unsatisfiable schema: {other!r}")
    result = dict(one)
    for keyword, value in other.items():
        if keyword not in result:
            result[keyword] = value
        elif keyword == "allOf":
            result["allOf"] = [*result["allOf"], *value]
        elif keyword == "$ref":
            result["allOf"] = [*result.get("allOf", ()), {keyword: value}]
        elif keyword in ("anyOf", "oneOf"):
            result[keyword] = [{"allOf": [alternative, {keyword: value}]} for alternative in result[keyword]]
        elif (join := _JOINS.get(keyword)) is not None:
            result[keyword] = join(result[keyword], value)
    return result


def _types(one: Any, other: Any) -> list[Any]:
    """An integer is a number."""
    these = one if isinstance(one, list) else [one]
    those = other if isinstance(other, list) else [other]
    shared = [kind for kind in these if kind in those or (kind == "integer" and "number" in those)]
    shared += [kind for kind in those if kind == "integer" and "number" in these and kind not in shared]
    if not shared:
        raise NoValue(f"Unsatisfiable schema: nothing is both {one} and {other}")
    return shared


def _properties(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, **{name: {"allOf": [one[name], inner]} if name in one else inner for name, inner in other.items()}}


def _same(one: Any, other: Any) -> Any:
    if one != other:
        raise NoValue(f"Unsatisfiable schema: nothing is both {one!r} and {other!r}")
    return one


def _both(one: Any, other: Any) -> Any:
    return {"allOf": [one, other]}


_JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "const": _same,
    "enum": lambda one, other: [each for each in one if each in other],
    "required": lambda one, other: [*one, *other],
    "properties": _properties,
    "items": _both,
    "additionalProperties": _both,
    "minimum": max,
    "exclusiveMinimum": max,
    "minLength": max,
    "minItems": max,
    "minProperties": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "maxLength": min,
    "maxItems": min,
    "maxProperties": min,
    "uniqueItems": max,
}
"""Other keywords, such as `title`, are those of the first schema."""
