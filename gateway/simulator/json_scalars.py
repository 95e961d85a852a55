"""Numbers and strings that a JSON schema accepts, for json_schema.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any
from uuid import UUID

from gateway.simulator.pattern import NoText, text_for
from gateway.simulator.words import WORDS

_SPAN = 100
"""The largest distance of a number from its only bound."""
_MOST_CHARS = 100_000

Bounds = tuple[Fraction | None, Fraction | None]
"""The least and the greatest value; None if there is no bound."""

_FORMATS: dict[str, Callable[[Random], str]] = {
    "date-time": lambda random: f"{_date(random)}T{_time(random)}Z",
    "date": lambda random: _date(random),  # noqa: PLW0108 - it is defined below
    "time": lambda random: f"{_time(random)}Z",
    "duration": lambda random: f"P{random.randrange(1, 29)}D",
    "email": lambda random: f"{word(random)}@{word(random)}.example",
    "hostname": lambda random: f"{word(random)}.example",
    "uri": lambda random: f"https://{word(random)}.example/{word(random)}",
    "ipv4": lambda random: f"192.0.2.{random.randrange(1, 255)}",
    "ipv6": lambda random: f"2001:db8::{random.randrange(1, 0xFFFF):x}",
    "uuid": lambda random: str(UUID(int=random.getrandbits(128), version=4)),
}


class NoValue(ValueError):
    """No value satisfies the schema, or this module finds none."""


def integer(schema: dict[str, Any], random: Random) -> int:
    # An integer that is a multiple of p/q (in lowest terms) is one of p.
    return int(_multiple(schema, Fraction(_step(schema, default=1).numerator), random))


def number(schema: dict[str, Any], random: Random) -> float:
    if "multipleOf" in schema:
        return float(_multiple(schema, _step(schema, default=1), random))
    low, high = _bounds(schema)
    if low is not None and high is not None:
        if low == high and not _is_open(schema):
            return float(low)
        _require_room(low, high, empty=low >= high)
        return float(low + (high - low) * Fraction(random.randrange(1, 8), 8))
    start = low if low is not None else high - _SPAN if high is not None else Fraction(0)
    return float(start + Fraction(random.randrange(1, 2 * _SPAN), 2))


def text(schema: dict[str, Any], random: Random) -> str:
    shortest, longest = int(schema.get("minLength", 0)), int(schema.get("maxLength", _MOST_CHARS))
    if shortest > longest or shortest > _MOST_CHARS:
        raise NoValue(f"Unsatisfiable schema: no text has {shortest} to {min(longest, _MOST_CHARS)} characters")
    if "pattern" in schema:
        try:
            return text_for(str(schema["pattern"]), random, shortest, longest)
        except NoText as error:
            raise NoValue(str(error)) from error
    if (formatted := _FORMATS.get(str(schema.get("format")))) is not None:
        return formatted(random)
    words = word(random)
    while len(words) < shortest:
        words += " " + word(random)
    return words[: max(shortest, min(longest, len(words)))]


def word(random: Random) -> str:
    return random.choice(WORDS)


def _multiple(schema: dict[str, Any], step: Fraction, random: Random) -> Fraction:
    low, high = _bounds(schema)
    least = None if low is None else math.ceil(low / step)
    most = None if high is None else math.floor(high / step)
    if least is not None and least * step == low and _is_exclusive(schema, "Minimum"):
        least += 1
    if most is not None and most * step == high and _is_exclusive(schema, "Maximum"):
        most -= 1
    if least is None:
        least = 0 if most is None else most - _SPAN
    if most is None:
        most = least + _SPAN
    _require_room(low, high, empty=least > most)
    return step * random.randint(least, min(most, least + _SPAN))


def _bounds(schema: dict[str, Any]) -> Bounds:
    lows = [_exact(schema[name]) for name in ("minimum", "exclusiveMinimum") if _is_number(schema.get(name))]
    highs = [_exact(schema[name]) for name in ("maximum", "exclusiveMaximum") if _is_number(schema.get(name))]
    return max(lows, default=None), min(highs, default=None)


def _is_exclusive(schema: dict[str, Any], side: str) -> bool:
    """Whether the bound itself is excluded. Up to draft 4, JSON Schema has a boolean for it."""
    exclusive: Any = schema.get(f"exclusive{side}")
    inclusive: Any = schema.get(side.lower())
    if isinstance(exclusive, bool):
        return exclusive
    if not _is_number(exclusive) or not _is_number(inclusive):
        return _is_number(exclusive)
    return bool(exclusive >= inclusive if side == "Minimum" else exclusive <= inclusive)


def _is_open(schema: dict[str, Any]) -> bool:
    return _is_exclusive(schema, "Minimum") or _is_exclusive(schema, "Maximum")


def _require_room(low: Fraction | None, high: Fraction | None, *, empty: bool) -> None:
    if empty:
        raise NoValue(f"Unsatisfiable schema: minimum ({low}) is greater than maximum ({high})")


def _step(schema: dict[str, Any], default: int) -> Fraction:
    step = _exact(schema.get("multipleOf", default))
    if step <= 0:
        raise NoValue(f"Invalid multipleOf: {step}")
    return step


def _exact(value: Any) -> Fraction:
    if not _is_number(value):
        raise NoValue(f"Invalid number: {value!r}")
    return Fraction(str(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _date(random: Random) -> str:
    return f"2026-{random.randrange(1, 13):02}-{random.randrange(1, 29):02}"


def _time(random: Random) -> str:
    return f"{random.randrange(24):02}:{random.randrange(60):02}:{random.randrange(60):02}"
