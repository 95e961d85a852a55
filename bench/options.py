"""Common types of the benchmarks' options: lists of names and of numbers, with an error message that gives the
reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """An argparse type: names separated by commas, each of them one of `known`."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        if not found:
            raise argparse.ArgumentTypeError(f"name at least one of {', '.join(known)}")
        return found

    return read


def counts(text: str) -> list[int]:
    """An argparse type: whole numbers from 1, separated by commas. An empty text has none."""
    if not text:
        return []
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"whole numbers from 1, separated by commas, not {text!r}")
    return found


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return found


def amounts(text: str) -> list[float]:
    """An argparse type: numbers above 0, separated by commas. An empty text has none."""
    return [positive(each) for each in text.split(",")] if text else []


def count(text: str) -> int:
    """An argparse type: a whole number from 1."""
    found, *others = counts(text) or [0]
    if others or not found:
        raise argparse.ArgumentTypeError(f"one whole number from 1, not {text!r}")
    return found
