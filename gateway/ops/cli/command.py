"""How commands show their usage, and say what is wrong with an option."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

# Newer versions of Typer say these in pydantic's words.
_PLAIN = (
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"Input should be (greater than or equal to|at least) "), "must be at least "),
    (re.compile(r"Input should be (less than or equal to|at most) "), "must be at most "),
    (re.compile(r"Input should be a valid integer.*"), "must be a whole number"),
    (re.compile(r"Input should be a valid number.*"), "must be a number"),
    (re.compile(r"Input should be "), "must be "),
)


class KvgateCommand(TyperCommand):
    """One command of `kvgate`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: FILE, not {FILE}."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises typer.BadParameter in plain words."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            for pattern, words in _PLAIN:
                error.message = pattern.sub(words, error.message)
            raise
