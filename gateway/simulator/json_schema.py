"""A document that a JSON schema accepts: what a model writes whose output a schema constrains.

Read are $ref, allOf, the first of anyOf and oneOf, const, enum, type, properties, required, items, prefixItems,
minItems, maxItems, the bounds of numbers, multipleOf, minLength, maxLength, format and pattern. Other keywords are
ignored. For a pattern a few texts are tried, its own words among them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any

from gateway.simulator.words import WORDS

_SHALLOW = 4
"""Values that may be absent are present down to this depth, so that recursive schemas end."""
_MOST_VALUES = 20_000
_MOST_CHARS = 100_000
_SPAN = 100
"""The distance of the largest and the smallest number of a schema without two bounds."""
_FORMATS = {
    "date-time": "2026-01-31T12:00:00Z",
    "date": "2026-01-31",
    "time": "12:00:00Z",
    "duration": "P3D",
    "email": "somebody@some.example",
    "hostname": "some.example",
    "uri": "https://some.example/page",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uuid": "7d444840-9dc0-41d1-b245-5ffdce74fad2",
}
_TEXTS = (*(char * length for length in range(1, 21) for char in "0aA"), *_FORMATS.values(), "")


class NoValue(ValueError):
    """The schema is wrong, nothing satisfies it, or this module finds nothing."""


def json_text(schema: object, seed: bytes) -> str:
    """A document that `schema` accepts, the same one for the same seed. Raises NoValue."""
    try:
        value = _Writer(schema, Random(seed)).value(schema, 0)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except NoValue:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise NoValue(f"the simulated replica finds no document: {error}") from error


def text_for(pattern: str, least: int = 0, most: int = _MOST_CHARS) -> str:
    """A text of `least` to `most` characters in which `pattern` is found. Raises NoValue."""
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise NoValue(f"regex parse error: {pattern!r}: {error}") from error
    words: list[str] = re.findall(r"\w+", pattern)
    for text in (*words, *_TEXTS):
        if least <= len(text) <= most and expression.search(text):
            return text
    raise NoValue(f"the simulated replica finds no text of {least} to {most} characters for {pattern!r}")


class _Writer:
    def __init__(self, root: object, random: Random) -> None:
        self._root = root
        self._random = random
        self._values_left = _MOST_VALUES

    def value(self, schema: Any, depth: int) -> Any:
        schema = self._plain(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        match _kind(schema, depth):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._text(schema)
            case "integer":  # one that is a multiple of p/q is one of p
                return int(self._number(schema, Fraction(_exact(schema.get("multipleOf", 1)).numerator)))
            case "number":
                return float(self._number(schema, _exact(schema.get("multipleOf", 0.001))))
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
            case kind:
                raise NoValue(f"Invalid type: {kind}")

    def _plain(self, schema: Any, depth: int) -> dict[str, Any]:
        """The schema, the parts of its allOf, what its $ref names and one of its anyOf and oneOf, all in one."""
        self._values_left -= 1
        if self._values_left < 0:
            raise NoValue(f"the simulated replica writes at most {_MOST_VALUES} values")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise NoValue(f"Unsatisfiable schema: {schema!r}")
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self._named(schema["$ref"]))
        several = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
        parts += [each[0] if depth < _SHALLOW else min(each, key=_is_nested) for each in several]
        plain = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
        for part in parts:
            inner = self._plain(part, depth)
            for name in inner.keys() & plain.keys() & {"properties", "required"}:
                both = inner[name], plain[name]
                plain[name] = {**both[0], **both[1]} if name == "properties" else [*both[0], *both[1]]
            plain = {**inner, **plain}
        return plain

    def _named(self, ref: str) -> Any:
        found: Any = {"#": self._root}
        for step in ref.split("/"):
            try:
                found = found[int(step) if isinstance(found, list) else step]
            except (LookupError, TypeError, ValueError) as error:
                raise NoValue(f"Pointer '{ref.removeprefix('#')}' does not exist") from error
        return found

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        names = [name for name in properties if depth < _SHALLOW or name in required]
        names += [name for name in required if name not in properties]
        others = schema.get("additionalProperties", True)
        return {name: self.value(properties.get(name, others), depth + 1) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        wanted = (len(first) or 1) if depth < _SHALLOW else 0
        count = max(schema.get("minItems", 0), min(wanted, schema.get("maxItems", wanted)))
        return [self.value(first[at] if at < len(first) else others, depth + 1) for at in range(count)]

    def _number(self, schema: dict[str, Any], step: Fraction) -> Fraction:
        def bounds(name: str, whole: Callable[[Fraction], int]) -> list[int]:
            return [whole(_exact(schema[name]) / step)] if name in schema else []

        lows = bounds("minimum", math.ceil) + bounds("exclusiveMinimum", lambda bound: math.floor(bound) + 1)
        highs = bounds("maximum", math.floor) + bounds("exclusiveMaximum", lambda bound: math.ceil(bound) - 1)
        span = int(_SPAN / step)
        low = max(lows, default=min(highs, default=span) - span)
        high = min(highs, default=low + span)
        if low > high:
            least, most = (schema.get(side, schema.get(f"exclusive{side.title()}")) for side in ("minimum", "maximum"))
            raise NoValue(f"Unsatisfiable schema: minimum ({least}) is greater than maximum ({most})")
        return self._random.randint(low, high) * step

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", _MOST_CHARS)
        if least > min(most, _MOST_CHARS):
            raise NoValue(f"Unsatisfiable schema: no text has {least} to {min(most, _MOST_CHARS)} characters")
        if "pattern" in schema:
            return text_for(schema["pattern"], least, most)
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        text = self._random.choice(WORDS)
        while len(text) < least:
            text += " " + self._random.choice(WORDS)
        return text[: min(most, max(least, len(WORDS[0])))]


def _kind(schema: dict[str, Any], depth: int) -> object:
    told = schema.get("type")
    if isinstance(told, list):
        return "null" if depth >= _SHALLOW and "null" in told else told[0]
    keywords = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array"}
    return told or next((kind for keyword, kind in keywords.items() if keyword in schema), "string")


def _is_nested(schema: Any) -> bool:
    return schema is not True and schema.get("type", "object") in ("object", "array")


def _exact(value: float) -> Fraction:
    return Fraction(str(value))
