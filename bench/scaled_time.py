"""Engines in scaled time (--speed): converts their figures back, and tells whether the machine kept up with them."""

from __future__ import annotations

from bench.load import Result

_LEAST_IDLE = 0.2
"""Below this share the machine was the limit, and not the engines or the router."""
INVALID = f"invalid: under {_LEAST_IDLE:.0%} idle, or no answers"


def ttft_ms(result: Result, speed: float) -> list[float]:
    """Sorted, in the engines' own time."""
    return [round(each * 1000 * speed, 2) for each in sorted(result.ttft_s)]


def per_s(result: Result, speed: float) -> float:
    """Requests per second of the engines' own time."""
    return round(result.requests / result.wall_s / speed, 4)


def is_valid(result: Result, speed: float, idle: float) -> bool:
    return result.requests > 0 and (speed == 1 or idle >= _LEAST_IDLE)


def why_invalid(requests: int, idle: float) -> str:
    """Why a run is not valid."""
    if not requests:
        return "no request was answered"
    return f"only {idle * 100:.0f} % idle CPU in scaled time, under {_LEAST_IDLE * 100:.0f} %"
