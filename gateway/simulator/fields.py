"""Typed reads of a JSON body. Each refuses a value of another type with a 400 that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from gateway.simulator.errors import bad_request

_Kind = TypeVar("_Kind")


def json_object(data: bytes) -> dict[str, Any]:
    """A body, which is a JSON object."""
    try:
        return as_mapping(orjson.loads(data), "body")
    except orjson.JSONDecodeError as error:
        raise bad_request(f"JSON decode error: {error}") from error


def text(body: Mapping[str, Any], name: str) -> str | None:
    return _typed(body, name, str, "string")


def required_text(body: Mapping[str, Any], name: str) -> str:
    value = text(body, name)
    if value is None:
        raise bad_request(f"{name}: Field required", name)
    return value


def integer(body: Mapping[str, Any], name: str, minimum: int) -> int | None:
    value = _typed(body, name, int, "integer")
    if value is not None and value < minimum:
        raise bad_request(f"{name} must be at least {minimum}, got {value}.", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = _typed(body, name, bool, "boolean")
    return default if value is None else value


def sequence(body: Mapping[str, Any], name: str) -> list[Any]:
    """The list under `name`; empty where the field is absent or null."""
    return _typed(body, name, list, "list") or []


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under `name`; empty where the field is absent or null."""
    return _typed(body, name, dict, "dictionary") or {}


def as_mapping(value: object, where: str) -> dict[str, Any]:
    if value is None:
        raise bad_request(f"{where}: Input should be a valid dictionary", where)
    return mapping({where: value}, where)


def _typed(body: Mapping[str, Any], name: str, kind: type[_Kind], word: str) -> _Kind | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise bad_request(f"{name}: Input should be a valid {word}", name)
    return value
