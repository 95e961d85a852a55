"""Constrained answers: `response_format`, vLLM's `structured_outputs`, and documents that a JSON schema accepts.

Of a schema are read $ref, the first of anyOf and oneOf, const, enum, type, properties, required, items, prefixItems,
minItems, maxItems, the bounds of numbers, minLength, maxLength and format. Some other keywords are refused, the rest is
ignored.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from gateway.simulator.errors import bad_request
from gateway.simulator.prompt import WORDS

Constraint = Callable[[bytes], str]
"""Makes the text of an answer, the same one for the same seed. Raises a 400 if there is none."""

_ANY_OBJECT = {"properties": {"answer": {"type": "string"}}}
_SHALLOW = 4
"""Values that may be absent are present down to this depth, so that recursive schemas end."""
_REFUSED = frozenset({"allOf", "not", "if", "multipleOf", "uniqueItems", "contains", "minProperties", "pattern"})
_MOST_VALUES = 20_000
_MOST_CHARS = 100_000
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
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


def constraint(body: dict[str, Any]) -> Constraint | None:
    """The constraint of a chat or completions body, or None. Raises a 400."""
    told, outputs = body.get("response_format") or {"type": "text"}, body.get("structured_outputs")
    if told["type"] == "text" and outputs is None:
        return None
    wanted: dict[str, Any] = {kind: given for kind, given in (outputs or {}).items() if given is not None}
    if told["type"] == "json_schema":
        wanted["json"] = (told.get("json_schema") or {}).get("schema")
    elif told["type"] != "text":
        wanted[told["type"]] = True
    if len(wanted) != 1:
        raise bad_request(f"an answer has one constraint, not {len(wanted)}: {', '.join(wanted)}")
    match wanted.popitem():
        case "json", schema:
            try:
                schema = orjson.loads(schema) if isinstance(schema, str) else schema
            except orjson.JSONDecodeError as error:
                raise bad_request(f"structured_outputs.json: {error}") from error
            return lambda seed: json_text(schema, seed)
        case "choice", [_, *_] as choices:
            return lambda seed: str(Random(seed).choice(choices))
        case "json_object", True:
            return lambda seed: json_text(_ANY_OBJECT, seed)
        case kind, given:
            message = f"The simulated replica knows no {kind} like {given!r}; it has json, json_object and choice."
            raise bad_request(message)


def json_text(schema: object, seed: bytes) -> str:
    """A document that `schema` accepts, the same one for the same seed. Raises a 400 if the schema is wrong, nothing
    satisfies it, or nothing is found here."""
    try:
        value = _Writer(schema, Random(seed)).value(schema, 0)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise bad_request(f"Grammar error: {error}") from error


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
            case "integer":
                return self._number(schema, 1)
            case "number":
                return float(self._number(schema, 0.25))
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
            case kind:
                raise ValueError(f"Invalid type: {kind}")

    def _plain(self, schema: Any, depth: int) -> dict[str, Any]:
        """The schema, what its $ref names and one of its anyOf and oneOf, all in one."""
        self._values_left -= 1
        if self._values_left < 0:
            raise ValueError(f"the simulated replica writes at most {_MOST_VALUES} values")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ValueError(f"Unsatisfiable schema: {schema!r}")
        if odd := sorted(_REFUSED & schema.keys()):
            raise ValueError(f"The simulated replica does not read {', '.join(odd)}")
        parts = [self._named(schema["$ref"])] if "$ref" in schema else []
        several = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
        parts += [each[0] if depth < _SHALLOW else min(each, key=_is_nested) for each in several]
        plain = {name: value for name, value in schema.items() if name not in ("$ref", "anyOf", "oneOf")}
        for part in parts:
            plain = {**self._plain(part, depth), **plain}
        return plain

    def _named(self, ref: str) -> Any:
        found: Any = {"#": self._root}
        try:
            for step in ref.split("/"):
                found = found[int(step) if isinstance(found, list) else step]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"Pointer '{ref.removeprefix('#')}' does not exist") from error
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

    def _number(self, schema: dict[str, Any], step: float) -> float:
        """A number next to a bound, or any if there is none."""
        bounds = {name: schema[name] for name in _BOUNDS if name in schema}
        for bound in bounds.values() or [self._random.randint(0, 100)]:
            near = math.floor(bound) if step == 1 else bound
            for value in (near, near + step, near - step):
                if all(_BOUNDS[name](value, each) for name, each in bounds.items()):
                    return value
        least, most = (schema.get(side, schema.get(f"exclusive{side.title()}")) for side in ("minimum", "maximum"))
        raise ValueError(f"Unsatisfiable schema: minimum ({least}) is greater than maximum ({most})")

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", _MOST_CHARS)
        text = _FORMATS.get(schema.get("format", "")) or self._random.choice(WORDS)
        while len(text) < min(least, _MOST_CHARS):
            text += " " + self._random.choice(WORDS)
        if not least <= len(text[:most]):
            raise ValueError(f"Unsatisfiable schema: no text has {least} to {min(most, _MOST_CHARS)} characters")
        return text[:most]


def _kind(schema: dict[str, Any], depth: int) -> object:
    told = schema.get("type")
    if isinstance(told, list):
        return "null" if depth >= _SHALLOW and "null" in told else told[0]
    keywords = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array"}
    return told or next((kind for keyword, kind in keywords.items() if keyword in schema), "string")


def _is_nested(schema: Any) -> bool:
    return schema is not True and schema.get("type", "object") in ("object", "array")
