"""The one error of the command line."""

from __future__ import annotations


class CommandError(Exception):
    """Printed as one line; the command then exits with 1."""
