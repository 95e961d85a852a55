"""A document that a JSON schema accepts: the answer of a model whose output a schema constrains.

Supported are $ref within the schema, const, enum, allOf, anyOf, oneOf (as anyOf), type, the bounds of numbers, strings
and arrays, pattern, format, properties, required, additionalProperties, prefixItems, items and uniqueItems. Keywords
that only exclude values (`not`, `if`, dependencies, patternProperties) are ignored.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any
from urllib.parse import unquote

from gateway.simulator import json_scalars
from gateway.simulator.json_scalars import NoValue
from gateway.simulator.schema_merge import merged

_SHALLOW = 4
"""Optional values are present down to this depth. Below it only required ones are, so that recursive schemas end."""
_DEEPEST = 48
_MOST_VALUES = 20_000
_UNIQUE_ATTEMPTS = 20

_KIND_OF_KEYWORD = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "minProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}


class _TooLarge(Exception):
    """A schema needs too many values. Unlike NoValue, this ends the search."""


def json_text(schema: object, seed: bytes) -> str:
    """A document that `schema` accepts, the same one for the same seed. Raises NoValue."""
    try:
        value = _Generator(schema, Random(seed)).value(schema, 0)
    except _TooLarge as error:
        raise NoValue(f"the simulated replica writes at most {_MOST_VALUES} values") from error
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class _Generator:
    def __init__(self, root: object, random: Random) -> None:
        self._root = root
        self._random = random
        self._values_left = _MOST_VALUES

    def value(self, schema: object, depth: int) -> Any:
        if depth > _DEEPEST:
            raise NoValue(f"Unsatisfiable schema: nothing ends it within {_DEEPEST} levels")
        schema = self._plain(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of_enum(schema)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._alternative(schema, name, depth)
        return self._of_kind(self._kind(schema, depth), schema, depth)

    def _plain(self, schema: object) -> dict[str, Any]:
        """`schema` without the $ref and allOf at its top."""
        while True:
            self._values_left -= 1
            if self._values_left < 0:
                raise _TooLarge
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                raise NoValue(f"Unsatisfiable schema: {schema!r}")
            if "$ref" in schema:
                rest = {name: value for name, value in schema.items() if name != "$ref"}
                schema = merged(rest, self._resolved(schema["$ref"]))
            elif "allOf" in schema:
                rest = {name: value for name, value in schema.items() if name != "allOf"}
                for part in _list(schema, "allOf"):
                    rest = merged(rest, part)
                schema = rest
            else:
                return schema

    def _resolved(self, ref: object) -> object:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise NoValue(f"$ref {ref!r}: only pointers into the schema are followed")
        found: Any = self._root
        for step in ref[1:].split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise NoValue(f"Pointer '{ref[1:]}' does not exist")
        return found

    def _one_of_enum(self, schema: dict[str, Any]) -> Any:
        kinds = _kinds(schema)
        values = [each for each in _list(schema, "enum") if not kinds or _is_one_of(each, kinds)]
        if not values:
            raise NoValue("Unsatisfiable schema: enum is empty")
        return self._random.choice(values)

    def _alternative(self, schema: dict[str, Any], name: str, depth: int) -> Any:
        """A value for one of several schemas: for any of them at a shallow depth, else for one that can end."""
        alternatives = list(_list(schema, name))
        self._random.shuffle(alternatives)
        alternatives.sort(key=_is_null if depth < _SHALLOW else _is_nested)
        rest = {key: value for key, value in schema.items() if key != name}
        failure = NoValue(f"Unsatisfiable schema: {name} is empty")
        for alternative in alternatives:
            try:
                return self.value(merged(rest, alternative), depth + 1)
            except NoValue as error:
                failure = error
        raise failure

    def _kind(self, schema: dict[str, Any], depth: int) -> object:
        kinds = _kinds(schema)
        if not kinds:
            return next((kind for keyword, kind in _KIND_OF_KEYWORD.items() if keyword in schema), "string")
        if depth >= _SHALLOW and "null" in kinds:
            return "null"
        return kinds[0]

    def _of_kind(self, kind: object, schema: dict[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return json_scalars.text(schema, self._random)
            case "integer":
                return json_scalars.integer(schema, self._random)
            case "number":
                return json_scalars.number(schema, self._random)
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
        raise NoValue(f"Invalid type: {kind}")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise NoValue(f"Invalid properties: {properties!r}")
        required = dict.fromkeys(_list(schema, "required"))
        most = schema.get("maxProperties", _MOST_VALUES)
        found: dict[str, Any] = {}
        for name, inner in properties.items():
            if name in required:
                found[name] = self.value(inner, depth + 1)
            elif depth < _SHALLOW and len(found) + len(required) < most:
                try:
                    found[name] = self.value(inner, depth + 1)
                except NoValue:
                    continue
        others = schema.get("additionalProperties", True)
        for name in required:
            if name not in found:
                found[str(name)] = self.value(others, depth + 1)
        fewest = schema.get("minProperties", 0)
        wanted = 1 if isinstance(others, dict) and not properties and depth < _SHALLOW else 0
        while len(found) < max(fewest, min(wanted, most)):
            try:
                found[f"{json_scalars.word(self._random)}{len(found) or ''}"] = self.value(others, depth + 1)
            except NoValue:
                if len(found) < fewest:
                    raise
                break
        return found

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first, others = _list(schema, "prefixItems"), schema.get("items", True)
        if isinstance(others, list):  # up to draft 2019-09
            first, others = others, schema.get("additionalItems", True)
        fewest, most = schema.get("minItems", 0), schema.get("maxItems", _MOST_VALUES)
        if fewest > most:
            raise NoValue(f"Unsatisfiable schema: minItems ({fewest}) is greater than maxItems ({most})")
        wanted = 0
        if depth < _SHALLOW:
            wanted = len(first) + (0 if others is False or "items" not in schema else self._random.randint(1, 2))
        found: list[Any] = []
        while len(found) < max(fewest, min(wanted, most)):
            inner = first[len(found)] if len(found) < len(first) else others
            try:
                found.append(self._next_item(inner, found, schema, depth))
            except NoValue:
                if len(found) < fewest:
                    raise
                break
        return found

    def _next_item(self, inner: object, found: list[Any], schema: dict[str, Any], depth: int) -> Any:
        item = self.value(inner, depth + 1)
        if schema.get("uniqueItems") is not True:
            return item
        for _ in range(_UNIQUE_ATTEMPTS):
            if item not in found:
                return item
            item = self.value(inner, depth + 1)
        raise NoValue("Unsatisfiable schema: not enough different items")


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name, [])
    if not isinstance(value, list):
        raise NoValue(f"Invalid {name}: {value!r}")
    return value


def _kinds(schema: dict[str, Any]) -> list[object]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _is_one_of(value: object, kinds: list[object]) -> bool:
    kind = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    name = kind.get(type(value), "null")
    return name in kinds or (name == "integer" and "number" in kinds)


def _is_null(schema: object) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


def _is_nested(schema: object) -> bool:
    """Whether the schema may have further levels."""
    return isinstance(schema, dict) and (
        any(name in schema for name in ("$ref", "allOf", "anyOf", "oneOf", "properties", "items"))
        or schema.get("type") in ("object", "array")
    )
