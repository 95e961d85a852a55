"""Typed reads of a parsed JSON body. Each refuses a value of another type with a 400 that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.simulator.errors import bad_request


def text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{name}: Input should be a valid string", name)
    return value


def required_text(body: Mapping[str, Any], name: str) -> str:
    value = text(body, name)
    if value is None:
        raise bad_request(f"{name}: Field required", name)
    return value


def integer(body: Mapping[str, Any], name: str, minimum: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_request(f"{name}: Input should be a valid integer", name)
    if value < minimum:
        raise bad_request(f"{name} must be at least {minimum}, got {value}.", name)
    return value


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise bad_request(f"{name}: Input should be a valid number", name)
    return float(value)


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_request(f"{name}: Input should be a valid boolean", name)
    return value


def sequence(body: Mapping[str, Any], name: str) -> list[Any]:
    """The list under `name`; empty where the field is absent or null."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_request(f"{name}: Input should be a valid list", name)
    return value


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under `name`; empty where the field is absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    return as_mapping(value, name)


def as_mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{where}: Input should be a valid dictionary", where)
    return value
